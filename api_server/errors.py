"""The catalogue of what can go wrong for a client, and the one rendering of it.

Invariant: a client sees a status, a type, a code, a text of ours and the name of the field, in the same shape on every
route, as JSON and inside a stream. Texts of exceptions, paths and addresses stay in the log. Rejected: numeric codes,
because clients branch on names such as `context_length_exceeded`.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from octavo.protocol.engine_messages import ErrorCode, RequestOutput

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RETRY_AFTER_S = 1


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


class ErrorDetail(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's envelope of it."""

    error: ErrorDetail


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

    def to_json(self) -> bytes:
        """Render the body, which is also the data of an error event in a stream."""
        _, error_type, code = self.kind.value
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, error_type, self.param, code)))


def invalid_value(param: str, rule: str) -> ApiError:
    """The field `param` breaks `rule`, which reads on after the field's name."""
    return ApiError(ErrorKind.INVALID_VALUE, f"{param} {rule}", param)


def unsupported(param: str, reason: str = "is not supported by this server") -> ApiError:
    """The field `param` asks for what we cannot do."""
    return ApiError(ErrorKind.UNSUPPORTED, f"{param} {reason}", param)


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
    return internal_error()
