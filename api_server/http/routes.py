"""Every route of the server, in one table: from it come the application, the description of the API, and tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from octavo.api_server.anthropic.answer import CountTokensAnswer, MessageAnswer
from octavo.api_server.anthropic.answer import StreamEvent as MessageStreamEvent
from octavo.api_server.anthropic.messages import CountTokens, MessagesFormat
from octavo.api_server.anthropic.schemas import CountTokensRequest, MessagesRequest
from octavo.api_server.errors import ErrorShape
from octavo.api_server.generation.run import Generator
from octavo.api_server.health import HealthRoutes, ServerState
from octavo.api_server.http.docs_page import show_docs
from octavo.api_server.http.openapi import make_openapi_handler
from octavo.api_server.http.reply import Format, GenerationRoute
from octavo.api_server.metrics import Metrics
from octavo.api_server.openai.chat import ChatFormat
from octavo.api_server.openai.chat_schemas import ChatChunk, ChatCompletion, ChatRequest
from octavo.api_server.openai.completion_schemas import Completion, CompletionRequest
from octavo.api_server.openai.completions import CompletionFormat
from octavo.api_server.openai.models import Model, ModelList, ModelRoutes
from octavo.api_server.openai.responses import ResponsesFormat
from octavo.api_server.openai.responses_answer import ResponseAnswer
from octavo.api_server.openai.responses_answer import StreamEvent as ResponseStreamEvent
from octavo.api_server.openai.responses_schemas import ResponsesRequest
from octavo.api_server.openai.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerRoutes,
)
from octavo.protocol.config import ModelConfig

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Services(NamedTuple):
    """What handlers are made of."""

    generator: Generator
    state: ServerState
    metrics: Metrics
    model: ModelConfig


class Route(NamedTuple):
    """One route.

    Attributes:
        path: as aiohttp writes it.
        make_handler: from the services of one API server.
        body: of a request; None when there is none.
        answer: body of a 200 that is JSON and not streamed; None for another kind.
        event: data of a stream's events; None where nothing is streamed.
        error_shape: how errors are written.
    """

    method: str
    path: str
    make_handler: Callable[[Services], Handler]
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    event: Any = None
    error_shape: ErrorShape = ErrorShape.OPENAI


def generates(form: Callable[[str], Format[Any]]) -> Callable[[Services], Handler]:
    """Return the maker of the handler of a format, which is given the model's name for its answers."""

    def make_handler(services: Services) -> Handler:
        name = services.model.served_model_names[0]
        return GenerationRoute(form(name), services.generator, services.state).handle

    return make_handler


def tokenizer_routes(services: Services) -> TokenizerRoutes:
    return TokenizerRoutes(services.generator, services.state)


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", generates(ChatFormat), ChatRequest, ChatCompletion, ChatChunk),
    Route("POST", "/v1/completions", generates(CompletionFormat), CompletionRequest, Completion, Completion),
    Route("POST", "/v1/responses", generates(ResponsesFormat), ResponsesRequest, ResponseAnswer, ResponseStreamEvent),
    Route(
        "POST",
        "/v1/messages",
        generates(MessagesFormat),
        MessagesRequest,
        MessageAnswer,
        MessageStreamEvent,
        ErrorShape.ANTHROPIC,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        lambda services: CountTokens(services.generator, services.state).handle,
        CountTokensRequest,
        CountTokensAnswer,
        error_shape=ErrorShape.ANTHROPIC,
    ),
    Route("GET", "/v1/models", lambda services: ModelRoutes(services.state, services.model).list, None, ModelList),
    Route(
        "GET", "/v1/models/{model:.+}", lambda services: ModelRoutes(services.state, services.model).get, None, Model
    ),
    Route("POST", "/tokenize", lambda services: tokenizer_routes(services).tokenize, TokenizeRequest, TokenizeAnswer),
    Route(
        "POST",
        "/detokenize",
        lambda services: tokenizer_routes(services).detokenize,
        DetokenizeRequest,
        DetokenizeAnswer,
    ),
    Route("GET", "/openapi.json", lambda services: make_openapi_handler(ROUTES)),
    Route("GET", "/docs", lambda services: show_docs),
    Route("GET", "/health", lambda services: HealthRoutes(services.state).health),
    Route("GET", "/ready", lambda services: HealthRoutes(services.state).ready),
    Route("GET", "/version", lambda services: HealthRoutes(services.state).version),
    Route("GET", "/metrics", lambda services: services.metrics.handle),
)
