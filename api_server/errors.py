"""The catalogue of what can go wrong for a client, and its renderings.

Invariant: a client sees a status, a type, a code, a text of ours and the name of the field, in the shape of the API
that its route belongs to, as JSON and inside a stream. Texts of exceptions, paths and addresses stay in the log.
Rejected: numeric codes, because clients branch on names such as `context_length_exceeded`.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

import msgspec

from octavo.protocol.engine_messages import ErrorCode, RequestOutput

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RETRY_AFTER_S = 1

Value = TypeVar("Value")


class ErrorKind(Enum):
    """(HTTP status, `type`, `code`) of an error."""

    INVALID_JSON = (400, INVALID_REQUEST, "invalid_json")
    INVALID_HTTP = (400, INVALID_REQUEST, "invalid_http")
    INVALID_TYPE = (400, INVALID_REQUEST, "invalid_type")
    INVALID_VALUE = (400, INVALID_REQUEST, "invalid_value")
    MISSING_FIELD = (400, INVALID_REQUEST, "missing_required_parameter")
    UNSUPPORTED = (400, INVALID_REQUEST, "unsupported_parameter")
    CONTEXT_LENGTH_EXCEEDED = (400, INVALID_REQUEST, "context_length_exceeded")
    NO_TOKEN_LEFT = (400, INVALID_REQUEST, "no_token_left")
    GRAMMAR_FAILED = (400, INVALID_REQUEST, "grammar_failed")
    UNAUTHORIZED = (401, INVALID_REQUEST, "invalid_api_key")
    HOST_NOT_ALLOWED = (403, INVALID_REQUEST, "host_not_allowed")
    MODEL_NOT_FOUND = (404, INVALID_REQUEST, "model_not_found")
    ROUTE_NOT_FOUND = (404, INVALID_REQUEST, "not_found")
    METHOD_NOT_ALLOWED = (405, INVALID_REQUEST, "method_not_allowed")
    BODY_TIMEOUT = (408, INVALID_REQUEST, "body_timeout")
    BODY_TOO_LARGE = (413, INVALID_REQUEST, "body_too_large")
    UNSUPPORTED_MEDIA_TYPE = (415, INVALID_REQUEST, "unsupported_media_type")
    OVERLOADED = (429, "rate_limit_error", "overloaded")
    INTERNAL = (500, SERVER_ERROR, "internal_error")
    NUMERICAL_ERROR = (500, SERVER_ERROR, "numerical_error")
    STARTING = (503, SERVER_ERROR, "starting")
    SHUTTING_DOWN = (503, SERVER_ERROR, "shutting_down")
    REQUEST_TIMEOUT = (504, SERVER_ERROR, "request_timeout")


WITH_RETRY_AFTER = {ErrorKind.OVERLOADED, ErrorKind.STARTING, ErrorKind.SHUTTING_DOWN}


ANTHROPIC_TYPES = {  # status -> `type`; every other status is an invalid request
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorShape(Enum):
    """How an API writes errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's envelope of it."""

    error: ErrorDetail


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Anthropic's envelope. Its error has OpenAI's fields too, so clients find `param` and `code` wherever they are."""

    type: str = "error"
    error: ErrorDetail
    request_id: str


class OllamaErrorBody(msgspec.Struct, frozen=True):
    """Ollama's error, which is a text. `param` and `code` are ours, as on every other route."""

    error: str
    param: str | None
    code: str


class ApiError(Exception):
    """A request that ends with an error for its client.

    Args:
        kind: entry of the catalogue.
        message: fixed text, with numbers or the client's own short values at most.
        param: path of the field that is wrong, such as `messages[0].role`.
    """

    def __init__(self, kind: ErrorKind, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param

    @property
    def status(self) -> int:
        return self.kind.value[0]

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with the error."""
        if self.kind is ErrorKind.UNAUTHORIZED:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.kind in WITH_RETRY_AFTER else {}

    @property
    def detail(self) -> ErrorDetail:
        """OpenAI's error object."""
        _, error_type, code = self.kind.value
        return ErrorDetail(self.message, error_type, self.param, code)

    def to_json(self) -> bytes:
        """Render OpenAI's body, which is also the data of an error event in a stream."""
        return msgspec.json.encode(ErrorBody(self.detail))

    def render(self, shape: ErrorShape, request_id: str) -> bytes:
        """Render the body in the shape of a route's API."""
        if shape is ErrorShape.OPENAI:
            return self.to_json()
        if shape is ErrorShape.OLLAMA:
            return msgspec.json.encode(OllamaErrorBody(self.message, self.param, self.kind.value[2]))
        return msgspec.json.encode(AnthropicErrorBody(error=self._anthropic_detail, request_id=request_id))

    @property
    def _anthropic_detail(self) -> ErrorDetail:
        error_type = ANTHROPIC_TYPES.get(self.status, INVALID_REQUEST)
        return ErrorDetail(self.message, error_type, self.param, self.kind.value[2])


def invalid_value(param: str, rule: str) -> ApiError:
    """The field `param` breaks `rule`, which reads on after the field's name."""
    return ApiError(ErrorKind.INVALID_VALUE, f"{param} {rule}", param)


def unsupported(param: str, reason: str = "is not supported by this server") -> ApiError:
    """The field `param` asks for what we cannot do."""
    return ApiError(ErrorKind.UNSUPPORTED, f"{param} {reason}", param)


def required(value: Value | None, param: str) -> Value:
    """Return the value of the field `param`, which the client has to give; raises ApiError."""
    if value is None:
        raise ApiError(ErrorKind.MISSING_FIELD, f"{param} is required", param)
    return value


def internal_error() -> ApiError:
    """A defect of ours; the log has it."""
    return ApiError(ErrorKind.INTERNAL, "the server failed on this request; its log says why")


def shutting_down() -> ApiError:
    return ApiError(ErrorKind.SHUTTING_DOWN, "the server is shutting down; send the request again")


def from_engine(output: RequestOutput) -> ApiError:
    """What the engine core's ending of a request means for the client."""
    if output.error is ErrorCode.NEVER_FITS:
        text = output.error_message or "the request needs more KV memory than this server has"
        return ApiError(ErrorKind.CONTEXT_LENGTH_EXCEEDED, text, "max_tokens")
    if output.error is ErrorCode.NUMERICAL_ERROR:
        return ApiError(ErrorKind.NUMERICAL_ERROR, "the model computed values that are no numbers for this request")
    if output.error is ErrorCode.NOTHING_ALLOWED:
        return ApiError(ErrorKind.NO_TOKEN_LEFT, "the request's own options forbid every token that could come next")
    if output.error is ErrorCode.GRAMMAR_FAILED:
        return ApiError(ErrorKind.GRAMMAR_FAILED, "the request's grammar or schema became too large to be followed")
    return internal_error()
