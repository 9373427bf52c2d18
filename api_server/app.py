"""The HTTP application of one API server: its routes, and what they share."""

from __future__ import annotations

from aiohttp import web

from octavo.api_server.admission import Admission
from octavo.api_server.api_keys import ApiKeys
from octavo.api_server.engine_client import EngineClient
from octavo.api_server.generation.gate import Gate
from octavo.api_server.health import HealthRoutes, ServerState
from octavo.api_server.http.surroundings import Surroundings
from octavo.api_server.metrics import Metrics
from octavo.api_server.openai.chat import ChatAnswer
from octavo.api_server.openai.completions import CompletionAnswer
from octavo.api_server.openai.generation import GenerationRoute
from octavo.api_server.openai.models import ModelRoutes
from octavo.api_server.openai.schemas import ChatRequest, CompletionRequest
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.config import EngineConfig


def make_app(
    config: EngineConfig,
    tokenizer: Tokenizer,
    engine: EngineClient,
    state: ServerState,
    admission: Admission,
    metrics: Metrics,
    api_keys: ApiKeys | None,
) -> web.Application:
    """Return the application of one API server."""
    surroundings = Surroundings(config, state, metrics, api_keys)
    app = web.Application(middlewares=[surroundings.around], client_max_size=config.api.max_body_bytes)
    app.on_response_prepare.append(surroundings.on_prepare)
    health, models = HealthRoutes(state), ModelRoutes(state, config.model)
    processor = Gate(config, tokenizer)
    shared = (state, admission, processor, engine, config.api.request_timeout_s)
    chat = GenerationRoute(ChatRequest, ChatAnswer, *shared)
    completions = GenerationRoute(CompletionRequest, CompletionAnswer, *shared)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat.handle),
            web.post("/v1/completions", completions.handle),
            web.get("/v1/models", models.list),
            web.get("/v1/models/{model:.+}", models.get),
            web.get("/health", health.health),
            web.get("/ready", health.ready),
            web.get("/version", health.version),
            web.get("/metrics", metrics.handle),
        ]
    )
    return app
