"""Every field of every route's body against values that no field should trust: a JSON error that names it, or a 200.

The routes and their fields come from the table that the server is made of, so a new one is covered when it is there.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_engine import Script
from http_rig import MODEL, Rig, running, says

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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("octavo")


def script(request: AddRequest) -> Script:
    if request.beam_search is not None:
        return Script(beams=[BeamOutput([40], 0.0, FinishReason.LENGTH)] * request.beam_search.num_choices)
    return says("Hello!")(request)


@pytest.fixture
async def rig(directory: Path) -> AsyncIterator[Rig]:
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
        return response.status, msgspec.json.decode(data, type=dict[str, Any])


def check_refusal(status: int, answer: Any, field: str) -> None:
    error = answer["error"]
    assert status in (400, 413, 415) or (status == 404 and field == "model"), answer
    assert error["type"] in ("invalid_request_error", "not_found_error"), answer
    assert isinstance(error["message"], str)
    json.dumps(answer).encode()


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
async def test_a_body_with_no_more_than_it_needs_is_answered(rig: Rig, route: Route) -> None:
    status, answer = await rig.post(route.path, base_of(route))
    assert status == 200, answer


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
async def test_no_value_of_any_field_is_more_than_a_refusal(rig: Rig, route: Route, value: str) -> None:
    assert route.body is not None
    for name in route.body.__struct_fields__:
        status, answer = await post(rig, route, body_with(route, name, VALUES[value]))
        if status == 200:
            assert value not in NEVER_VALID, (name, answer)
            continue
        check_refusal(status, answer, name)
        param = answer["error"]["param"]
        if answer["error"]["code"] == "invalid_json" and "surrogate" in value:
            assert param is None or param.startswith(name), (name, answer)  # the parser does not always say where
        elif answer["error"]["code"] not in CROSS_CHECKS:
            assert param is not None, (name, answer)
            assert param.startswith(name), (name, answer)


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
async def test_a_missing_field_is_named(rig: Rig, route: Route) -> None:
    assert route.body is not None
    for field in msgspec.structs.fields(route.body):
        if field.required:
            body = {name: value for name, value in base_of(route).items() if name != field.name}
            status, answer = await rig.post(route.path, body)
            assert status == 400
            assert answer["error"]["param"] == field.name
            assert field.name in answer["error"]["message"]


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
async def test_bodies_that_are_no_objects_are_refused(rig: Rig, route: Route) -> None:
    for body in (b"", b"[]", b"5", b'"x"', b"null", b"{", b"\xff", b'{"model": "\xed\xa0\x80"}', b"[" * 50_000):
        status, answer = await rig.post(route.path, body)
        check_refusal(status, answer, "")
    status, answer = await rig.post(route.path, base_of(route), headers={"Content-Type": "text/plain"})
    check_refusal(status, answer, "")
    assert status == 415
