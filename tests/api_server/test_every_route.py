"""Every field of every route's body against values that no field should trust: a JSON error that names it, or a 200.

The routes and their fields come from the table that the server is made of, so a new one is covered when it is there.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from http_rig import Rig
from route_bodies import (
    CROSS_CHECKS,
    NEVER_VALID,
    VALUES,
    WITH_BODY,
    answering,
    as_openai,
    base_of,
    body_with,
    check_refusal,
    post,
)

from octavo.api_server.http.routes import Route


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("octavo")


@pytest.fixture
async def rig(directory: Path) -> AsyncIterator[Rig]:
    async with answering(directory) as rig:
        yield rig


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
async def test_a_body_with_no_more_than_it_needs_is_answered(rig: Rig, route: Route) -> None:
    status, answer = await post(rig, route, json.dumps(base_of(route)).encode())
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
            status, answer = await post(rig, route, json.dumps(body).encode())
            assert status == 400
            assert answer["error"]["param"] == field.name
            assert field.name in answer["error"]["message"]


@pytest.mark.parametrize("route", WITH_BODY, ids=lambda route: route.path)
async def test_bodies_that_are_no_objects_are_refused(rig: Rig, route: Route) -> None:
    for body in (b"", b"[]", b"5", b'"x"', b"null", b"{", b"\xff", b'{"model": "\xed\xa0\x80"}', b"[" * 50_000):
        status, answer = await post(rig, route, body)
        check_refusal(status, answer, "")
    status, answer = await rig.post(route.path, base_of(route), headers={"Content-Type": "text/plain"})
    check_refusal(status, as_openai(answer, route.error_shape), "")
    assert status == 415
