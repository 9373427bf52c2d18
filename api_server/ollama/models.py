"""GET /api/tags, POST /api/show and GET /api/version: what Ollama's clients ask before they talk to a model."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from octavo.api_server.generation.gate import check_model
from octavo.api_server.health import ServerState, json_response
from octavo.api_server.http.body import read_body
from octavo.api_server.ollama.drafts import LATEST
from octavo.api_server.ollama.schemas import OllamaShowRequest
from octavo.protocol.config import ModelConfig

CAPABILITIES = ["completion", "tools"]


class OllamaDetails(msgspec.Struct):
    """`format` is that of the file of weights."""

    format: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """One of the list.

    Attributes:
        modified_at: when this server began to serve it.
        digest: changes when what is served changes.
    """

    name: str
    model: str
    modified_at: datetime
    digest: str
    details: OllamaDetails


class OllamaModelList(msgspec.Struct, kw_only=True):
    models: list[OllamaModel]


class OllamaShowAnswer(msgspec.Struct, kw_only=True):
    modified_at: datetime
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersion(msgspec.Struct):
    version: str


class OllamaModelRoutes:
    """Handlers of the three; every served name is a model."""

    def __init__(self, state: ServerState, model: ModelConfig) -> None:
        self.state = state
        self.model = model
        self.decoder = msgspec.json.Decoder(OllamaShowRequest)
        self.started_at = datetime.now(UTC)
        self.digest = hashlib.sha256(msgspec.json.encode(model)).hexdigest()
        self.details = OllamaDetails(model.weights_format)

    async def tags(self, request: web.Request) -> web.Response:
        self.state.check_serving()
        return json_response(OllamaModelList(models=[self._model(name) for name in self.model.served_model_names]))

    async def show(self, request: web.Request) -> web.Response:
        self.state.check_serving()
        body = await read_body(request, self.decoder)
        check_model(body.model.removesuffix(LATEST), self.model.served_model_names)
        answer = OllamaShowAnswer(
            modified_at=self.started_at,
            details=self.details,
            model_info={"general.context_length": self.model.max_model_len},
            capabilities=CAPABILITIES,
        )
        return json_response(answer)

    async def version(self, request: web.Request) -> web.Response:
        return json_response(OllamaVersion(version("octavo")))

    def _model(self, name: str) -> OllamaModel:
        return OllamaModel(name=name, model=name, modified_at=self.started_at, digest=self.digest, details=self.details)
