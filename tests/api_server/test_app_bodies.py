"""Malformed HTTP, bodies that are no JSON, bodies that are too large: each is refused with a JSON error."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_rig import MODEL, Rig, running, says

from octavo.api_server.errors import ApiError, ErrorKind
from octavo.api_server.http.body import decode_body
from octavo.api_server.openai.completion_schemas import CompletionRequest

CHAT, COMPLETIONS = PATHS = ("/v1/chat/completions", "/v1/completions")
SUBJECT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
}
JSON_HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("octavo")


@pytest.fixture
async def rig(directory: Path) -> AsyncIterator[Rig]:
    async with running(directory, says("Hello!"), max_body_bytes=100_000) as rig:
        yield rig
        assert rig.server.admission.num_live_requests == 0


def check_error(answer: Any, code: str, *texts: str) -> None:
    error = answer["error"]
    assert (error["code"], error["param"]) == (code, None), error
    assert all(text in error["message"] for text in texts), error["message"]


CONTENT_TYPES = {
    "application/json": 200,
    "application/json; charset=utf-8": 200,
    'application/json; charset="UTF-8"': 200,
    "APPLICATION/JSON": 200,
    "": 415,
    "text/plain": 415,
    "application/x-www-form-urlencoded": 415,
    "application/json; charset=utf-7": 415,
    "application/json; charset=latin-1": 415,
    "application/json; charset=nosuch": 415,
    "garbage": 415,
}
BAD_BODIES = (
    b"",
    b"{",
    b"not json",
    b"[]",
    b'"str"',
    b"null",
    b"5",
    b'{"model": "tiny", "prompt": "x"} trailing',
    b'\xef\xbb\xbf{"model": "tiny", "prompt": "x"}',
    b'{"model": "tiny", "prompt": "\xff"}',
    b'{"model": "tiny", "prompt": "x", "unknown": "\xff"}',
    b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "\\udc00 x"}',
    b'{"model": "tiny", "prompt": "x", "unknown": NaN}',
    b"{'model': 'tiny'}",
    b'{"model": "tiny", "prompt": "x",}',
    '{"model": "tiny", "prompt": "x"}'.encode("utf-16"),
    b'{"model": "tiny", "prompt": "x", "unknown": ' + b"[" * 64 + b"]" * 64 + b"}",
    b'{"model": "tiny", "prompt": "x", "unknown": ' + b"[" * 40_000,
    b'{"model": "tiny", "prompt": "x", "unknown": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
)


@pytest.mark.parametrize("path", PATHS)
async def test_b57_content_types(rig: Rig, path: str) -> None:
    body = {"model": MODEL, **SUBJECT[path]}
    for content_type, expected in CONTENT_TYPES.items():
        headers = {"Content-Type": content_type} if content_type else {}
        skipped = () if content_type else ("Content-Type",)
        status, answer = await rig.post(path, body, headers=headers, skip_auto_headers=skipped)
        assert status == expected, content_type
        if expected == 415:
            check_error(answer, "unsupported_media_type")


@pytest.mark.parametrize("path", PATHS)
async def test_b57_content_encodings(rig: Rig, path: str) -> None:
    body = json.dumps({"model": MODEL, **SUBJECT[path]}).encode()
    for encoding, data in (("gzip", gzip.compress(body)), ("gzip", b"bad"), ("br", b"bad"), ("nosuch", body)):
        status, answer = await rig.post(path, data, headers={**JSON_HEADERS, "Content-Encoding": encoding})
        assert status == 415, encoding
        check_error(answer, "unsupported_media_type")


@pytest.mark.parametrize("path", PATHS)
async def test_b57_bad_bodies(rig: Rig, path: str) -> None:
    for body in BAD_BODIES:
        sent = body.replace(b'{"model": "tiny",', b'{"model": "tiny", "messages": [{"role": "user"}],')
        status, answer = await rig.post(path, sent)
        assert status == 400, body[:80]
        assert answer["error"]["code"] in ("invalid_json", "invalid_type"), (body[:80], answer)


async def test_b57_duplicate_keys_and_nesting_up_to_the_limit_pass(rig: Rig) -> None:
    for tail in (
        b'"prompt": "y"',
        b'"unknown": ' + b"[" * 63 + b"]" * 63,
        b'"unknown": ' + b"[" * 9 + b'"[[{"]' + b"]" * 8,
    ):
        status, answer = await rig.post(COMPLETIONS, b'{"model": "tiny", "prompt": "x", ' + tail + b"}")
        assert status == 200, answer


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 65 + b'"' + b'\\"' * 2**21,
        b'{"prompt": "' + b'\\"' * 2**21 + b'\x01"}',
        b'{"prompt": "' + b"\\" * 2**21,
        b"[" * 65 + b'"",' * 2**20,
        b'{"":0,' * 2**19,
    ],
    ids=["deep", "control character", "no end", "empty strings", "objects"],
)
def test_what_is_wrong_is_found_in_linear_time(body: bytes) -> None:
    """Each takes a fraction of a second, and hours when strings are looked at again and again."""
    started = time.process_time()
    with pytest.raises(ApiError):
        decode_body(body, msgspec.json.Decoder(CompletionRequest))
    assert time.process_time() - started < 10


@pytest.mark.parametrize("value", ["guess", "x" * 100_000, "a` - at `$.n`", "int\n` - at `$.n`"])
def test_what_the_client_wrote_is_not_repeated(value: str) -> None:
    body = {"model": "m", "prompt": "x", "early_stopping": value}
    with pytest.raises(ApiError) as found:
        decode_body(json.dumps(body).encode(), msgspec.json.Decoder(CompletionRequest))
    assert (found.value.kind, found.value.param) == (ErrorKind.INVALID_VALUE, "early_stopping")
    assert found.value.message == "early_stopping: not one of the values that it may have"


def test_what_stands_behind_the_body_is_no_field() -> None:
    with pytest.raises(ApiError) as found:
        decode_body(b'{"model": "m", "prompt": "x"} more', msgspec.json.Decoder(CompletionRequest))
    assert (found.value.param, found.value.message) == (None, "the body is not valid JSON at byte 31")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_body_above_the_limit_is_refused(rig: Rig, path: str, is_chunked: bool) -> None:
    body = json.dumps({"model": MODEL, **SUBJECT[path], "pad": "x" * 100_000}).encode()

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    async with rig.session.post(path, data=parts() if is_chunked else body, headers=JSON_HEADERS) as response:
        assert response.status == 413
        check_error(await response.json(), "body_too_large", "100000")


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
MALFORMED = (
    b"GARBAGE\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    POST + b"Content-Length: -1\r\n\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
    GET + b"X: " + b"a" * 20_000 + b"\r\n\r\n",
    GET + b"Bad Name: x\r\n\r\n",
    GET + b"X: a\x00b\r\n\r\n",
)


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
async def test_what_cannot_be_expected_is_refused_in_words(rig: Rig, path: str) -> None:
    async with rig.session.post(path, headers={"Expect": "200-ok"}) as response:
        assert response.status == 417
        assert response.headers["X-Request-Id"]


@pytest.mark.parametrize("request_bytes", MALFORMED, ids=lambda data: data[-60:].decode("latin-1"))
async def test_malformed_http_gets_a_json_400_and_the_connection_closed(rig: Rig, request_bytes: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
    writer.write(request_bytes)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert json.loads(body)["error"]["code"] == "invalid_http"
    status, _ = await rig.complete()
    assert status == 200
