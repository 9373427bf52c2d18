"""Request bodies: from bytes of any kind to a typed request, or a 4xx that says what is wrong.

Invariant: what comes out is strict JSON in strict UTF-8, at most `MAX_DEPTH` deep, with every declared field of its
type, and of its range where that is part of the type. Large bodies are decoded in a thread, so that none holds up the
event loop.
"""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from aiohttp import web

from octavo.api_server.errors import ApiError, ErrorKind

MAX_DEPTH = 64
BODY_TIMEOUT_S = 60.0
INLINE_BYTES = 64 * 1024  # about 0.1 ms of decoding
# Ends with the body if nothing else ends it, and never goes back (*+): else the time would be quadratic, and no thread
# of the process runs meanwhile.
STRING_PATTERN = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
JSON_STRING = re.compile(STRING_PATTERN, re.DOTALL)
TO_ROUND_BRACKETS = bytes.maketrans(b"{}[]", b"()()")
NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
WHERE = re.compile(r" - at `\$\.?([^`]*)`$")
MISSING = re.compile(r"^Object missing required field `(\w+)`")
UNKNOWN_VALUE = "Invalid enum value"
WRONG_BYTE = re.compile(r"\(byte (\d+)\)$")
JSON_TOKEN = re.compile(STRING_PATTERN + rb"|[{}\[\]:,]", re.DOTALL)
MAX_TOKENS_BEFORE_FIELD = 2**15  # about 10 ms
FIELD_NAME = re.compile(rb'"(\w{1,64})"')
JSON_NAMES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}

Body = TypeVar("Body")


async def read_body(request: web.Request, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Read and decode the body of `request`; raise ApiError when it is not what `decoder` wants."""
    _check_headers(request)
    body = await _read(request)
    if len(body) <= INLINE_BYTES:
        return decode_body(body, decoder)
    return await asyncio.to_thread(decode_body, body, decoder)


def decode_body(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Decode JSON; raise ApiError that names the field where there is one."""
    try:
        if not body.isascii():
            body.decode()
        if is_too_deep(body):
            raise ApiError(ErrorKind.INVALID_JSON, f"the body is nested more than {MAX_DEPTH} levels deep")
        return decoder.decode(body)
    except UnicodeDecodeError as problem:
        raise ApiError(ErrorKind.INVALID_JSON, f"the body is not UTF-8 at byte {problem.start}") from None
    except msgspec.ValidationError as problem:
        raise _wrong_field(str(problem)) from None
    except msgspec.DecodeError as problem:
        raise _wrong_syntax(str(problem), body) from None


def is_too_deep(body: bytes) -> bool:
    """Return whether arrays and objects are nested more than MAX_DEPTH deep; at most MAX_DEPTH passes over `body`."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    brackets = JSON_STRING.sub(b"", body).translate(TO_ROUND_BRACKETS, NOT_BRACKETS)
    for _ in range(MAX_DEPTH):  # each pass takes the innermost level away
        if not brackets or b"(" * (MAX_DEPTH + 1) in brackets:
            break
        brackets = brackets.replace(b"()", b"")
    return bool(brackets)


def _check_headers(request: web.Request) -> None:
    if request.content_type != "application/json" or (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise ApiError(ErrorKind.UNSUPPORTED_MEDIA_TYPE, "Content-Type must be application/json in UTF-8")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(ErrorKind.UNSUPPORTED_MEDIA_TYPE, "Content-Encoding is not supported: send the body as it is")
    if request.content_length is not None and request.content_length > request.client_max_size:
        raise _too_large(request)


async def _read(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(request) from None
    except TimeoutError:
        raise ApiError(ErrorKind.BODY_TIMEOUT, f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    except web.RequestPayloadError:
        raise ApiError(ErrorKind.INVALID_HTTP, "the body does not follow its Content-Length or chunks") from None


def _too_large(request: web.Request) -> ApiError:
    return ApiError(ErrorKind.BODY_TOO_LARGE, f"the body has more than {request.client_max_size} bytes")


def _wrong_field(problem: str) -> ApiError:
    """Translate msgspec's text, which speaks of our schema and never of the client's values."""
    where = WHERE.search(problem)
    param = where[1].partition("[...]")[0] if where is not None else ""  # msgspec does not name keys of mappings
    if (missing := MISSING.match(problem)) is not None:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return ApiError(ErrorKind.MISSING_FIELD, f"{param} is required", param)
    rule = WHERE.sub("", problem)
    if rule.startswith(UNKNOWN_VALUE):  # the rest is the client's, however long
        rule = "not one of the values that it may have"
    rule = re.sub(r"\b\w+\b", lambda word: JSON_NAMES.get(word[0], word[0]), rule).replace("`", "")
    rule = rule[:1].lower() + rule[1:]
    kind = ErrorKind.INVALID_TYPE if ", got " in rule else ErrorKind.INVALID_VALUE
    return ApiError(kind, f"{param or 'the body'}: {rule}", param or None)


def _wrong_syntax(problem: str, body: bytes) -> ApiError:
    """Name the field if its value is what is wrong, as in `"temperature": NaN`."""
    where = WRONG_BYTE.search(problem)
    if where is None:
        return ApiError(ErrorKind.INVALID_JSON, "the body is not valid JSON")
    position = int(where[1])
    param = _field_at(body[:position])
    if param is None:
        return ApiError(ErrorKind.INVALID_JSON, f"the body is not valid JSON at byte {position}")
    return ApiError(ErrorKind.INVALID_JSON, f"{param}: not a JSON value at byte {position} of the body", param)


def _field_at(start: bytes) -> str | None:
    """Return the field of the body in whose value `start`, the beginning of the body, ends; None if that is far in."""
    depth, text, key = 0, b"", b""
    for number, token in enumerate(JSON_TOKEN.finditer(start)):
        if number == MAX_TOKENS_BEFORE_FIELD:
            return None
        match token[0]:
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
                key = key if depth else b""
            case b":" if depth == 1:
                key = text
            case b"," if depth == 1:
                key = b""
            case string:
                text = string
    name = FIELD_NAME.fullmatch(key)
    return None if name is None else name[1].decode()
