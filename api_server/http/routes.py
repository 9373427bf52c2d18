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
from octavo.api_server.errors import AnthropicErrorBody, ErrorBody, ErrorShape, OllamaErrorBody
from octavo.api_server.generation.run import Generator
from octavo.api_server.health import HealthRoutes, ServerState
from octavo.api_server.http.docs_page import show_docs
from octavo.api_server.http.openapi import make_openapi_handler
from octavo.api_server.http.reply import Format, GenerationRoute
from octavo.api_server.http.sse import NDJSON, SSE, SSE_UNTIL_DONE, Media
from octavo.api_server.metrics import Metrics
from octavo.api_server.ollama.answer import OllamaChatAnswer, OllamaGenerateAnswer
from octavo.api_server.ollama.formats import OllamaChatFormat, OllamaGenerateFormat
from octavo.api_server.ollama.models import OllamaModelList, OllamaModelRoutes, OllamaShowAnswer, OllamaVersion
from octavo.api_server.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
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
        event: JSON of a stream's events or lines, errors among them; None where nothing is streamed.
        error_shape: how errors are written.
        media: of a stream.
    """

    method: str
    path: str
    make_handler: Callable[[Services], Handler]
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    event: Any = None
    error_shape: ErrorShape = ErrorShape.OPENAI
    media: Media = SSE


def generates(form: Callable[[str], Format[Any]], media: Media = SSE) -> Callable[[Services], Handler]:
    """Return the maker of the handler of a format, which is given the model's name for its answers."""

    def make_handler(services: Services) -> Handler:
        name = services.model.served_model_names[0]
        return GenerationRoute(form(name), services.generator, services.state, media).handle

    return make_handler


def ollama_models(services: Services) -> OllamaModelRoutes:
    return OllamaModelRoutes(services.state, services.model)


def tokenizer_routes(services: Services) -> TokenizerRoutes:
    return TokenizerRoutes(services.generator, services.state)


ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/chat/completions",
        generates(ChatFormat, SSE_UNTIL_DONE),
        ChatRequest,
        ChatCompletion,
        ChatChunk | ErrorBody,
        media=SSE_UNTIL_DONE,
    ),
    Route(
        "POST",
        "/v1/completions",
        generates(CompletionFormat, SSE_UNTIL_DONE),
        CompletionRequest,
        Completion,
        Completion | ErrorBody,
        media=SSE_UNTIL_DONE,
    ),
    Route("POST", "/v1/responses", generates(ResponsesFormat), ResponsesRequest, ResponseAnswer, ResponseStreamEvent),
    Route(
        "POST",
        "/v1/messages",
        generates(MessagesFormat),
        MessagesRequest,
        MessageAnswer,
        MessageStreamEvent | AnthropicErrorBody,
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
    Route(
        "POST",
        "/api/chat",
        generates(OllamaChatFormat, NDJSON),
        OllamaChatRequest,
        OllamaChatAnswer,
        OllamaChatAnswer | OllamaErrorBody,
        ErrorShape.OLLAMA,
        NDJSON,
    ),
    Route(
        "POST",
        "/api/generate",
        generates(OllamaGenerateFormat, NDJSON),
        OllamaGenerateRequest,
        OllamaGenerateAnswer,
        OllamaGenerateAnswer | OllamaErrorBody,
        ErrorShape.OLLAMA,
        NDJSON,
    ),
    Route(
        "POST",
        "/api/show",
        lambda services: ollama_models(services).show,
        OllamaShowRequest,
        OllamaShowAnswer,
        error_shape=ErrorShape.OLLAMA,
    ),
    Route(
        "GET",
        "/api/tags",
        lambda services: ollama_models(services).tags,
        answer=OllamaModelList,
        error_shape=ErrorShape.OLLAMA,
    ),
    Route(
        "GET",
        "/api/version",
        lambda services: ollama_models(services).version,
        answer=OllamaVersion,
        error_shape=ErrorShape.OLLAMA,
    ),
    Route("GET", "/openapi.json", lambda services: make_openapi_handler(ROUTES)),
    Route("GET", "/docs", lambda services: show_docs),
    Route("GET", "/health", lambda services: HealthRoutes(services.state).health),
    Route("GET", "/ready", lambda services: HealthRoutes(services.state).ready),
    Route("GET", "/version", lambda services: HealthRoutes(services.state).version),
    Route("GET", "/metrics", lambda services: services.metrics.handle),
)
