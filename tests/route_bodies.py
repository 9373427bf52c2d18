"""Bodies of every route, right and wrong ones, and what a refusal must look like whatever the API of the route is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from fake_engine import Script
from http_rig import MODEL, Rig, running, says

from octavo.api_server.errors import ErrorShape
from octavo.api_server.http.routes import ROUTES, Route
from octavo.protocol.engine_messages import AddRequest, BeamOutput, FinishReason

WITH_BODY = [route for route in ROUTES if route.body is not None]
VALUES = {  # as they stand in a body
    "true": "true",
    "number": "7",
    "fraction": "0.5",
    "text": '"x"',
    "null": "null",
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "huge": "1e309",
    "negative": "-1",
    "2**70": str(2**70),
    "empty text": '""',
    "list": "[]",
    "list of lists": "[[[]]]",
    "object": "{}",
    "object of objects": '{"a": {"b": null}}',
    "lone surrogate": '"\\ud800"',
    "lone surrogate inside": '{"a": ["\\udfff"]}',
    "long text": json.dumps("x" * 10_000),
    "emoji": json.dumps("👩‍👧"),
    "list of emoji": json.dumps(["👩‍👧"]),
}
NEVER_VALID = {"NaN", "Infinity", "huge", "lone surrogate", "lone surrogate inside"}
CROSS_CHECKS = ("invalid_value", "unsupported_parameter", "context_length_exceeded")  # may name another field
SUBJECTS: dict[str, dict[str, Any]] = {  # required fields with values that are right
    "model": {"model": MODEL},
    "messages": {"messages": [{"role": "user", "content": "Hi"}]},
    "prompt": {"prompt": "Hi"},
    "input": {"input": "Hi"},
    "max_tokens": {"max_tokens": 3},
    "tokens": {"tokens": [40, 41]},
}


def script(request: AddRequest) -> Script:
    if request.beam_search is not None:
        return Script(beams=[BeamOutput([40], 0.0, FinishReason.LENGTH)] * request.beam_search.num_choices)
    return says("Hello!")(request)


@contextlib.asynccontextmanager
async def answering(directory: Path) -> AsyncIterator[Rig]:
    """A server that answers whatever is right, and has forgotten every request in the end."""
    async with running(directory, script, max_choices=8, max_model_len=20_000) as rig:
        yield rig
        await rig.until(lambda: rig.server.admission.num_live_requests == 0)


def base_of(route: Route) -> dict[str, Any]:
    """A body that is right, with no more than it needs."""
    assert route.body is not None
    required = {field.name for field in msgspec.structs.fields(route.body) if field.required}
    names = required | ({"prompt"} if "tokenize" in route.path and "tokens" not in required else set())
    return {name: value for field in names for name, value in SUBJECTS[field].items()}


def body_with(route: Route, name: str, value: str) -> bytes:
    members = {key: json.dumps(text) for key, text in base_of(route).items()} | {name: value}
    if name == "messages":
        members.pop("prompt", None)
    return ("{" + ", ".join(f"{json.dumps(key)}: {text}" for key, text in members.items()) + "}").encode()


async def post(rig: Rig, route: Route, body: bytes) -> tuple[int, Any]:
    """Return the status and the answer: a JSON object, or the text of a stream that ended."""
    async with rig.session.post(route.path, data=body, headers={"Content-Type": "application/json"}) as response:
        data = await response.read()
        if response.content_type == "text/event-stream":
            assert data.endswith(b"\n\n")
            return response.status, data.decode()
        if response.content_type == "application/x-ndjson":
            assert [msgspec.json.decode(line)["done"] for line in data.splitlines()][-1]
            return response.status, data.decode()
        return response.status, as_openai(msgspec.json.decode(data, type=dict[str, Any]), route.error_shape)


def as_openai(answer: dict[str, Any], shape: ErrorShape) -> dict[str, Any]:
    """Put an error of Ollama's into OpenAI's envelope: it has the same parts but the type."""
    if shape is not ErrorShape.OLLAMA or "error" not in answer:
        return answer
    detail = {"message": answer["error"], "param": answer["param"], "code": answer["code"]}
    return {"error": {"type": "invalid_request_error", **detail}}


def check_refusal(status: int, answer: Any, field: str) -> None:
    error = answer["error"]
    assert status in (400, 413, 415) or (status == 404 and field == "model"), answer
    assert error["type"] in ("invalid_request_error", "not_found_error"), answer
    assert isinstance(error["message"], str)
    json.dumps(answer).encode()
