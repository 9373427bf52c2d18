"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from octavo.api_server.generation.gate import check_model
from octavo.api_server.health import ServerState, json_response
from octavo.protocol.config import ModelConfig


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Model]


class ModelRoutes:
    """Handlers of the list and its entries; every served name is an entry."""

    def __init__(self, state: ServerState, model: ModelConfig) -> None:
        self.state = state
        created = int(time.time())
        self.models = {
            name: Model(id=name, created=created, max_model_len=model.max_model_len)
            for name in model.served_model_names
        }

    async def list(self, request: web.Request) -> web.Response:
        self.state.check_serving()
        return json_response(ModelList(data=[*self.models.values()]))

    async def get(self, request: web.Request) -> web.Response:
        self.state.check_serving()
        name = request.match_info["model"]
        check_model(name, [*self.models])
        return json_response(self.models[name])
