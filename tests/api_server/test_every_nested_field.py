"""Values that no field should trust, in every place inside the values of fields: parts, tools, items, entries of lists.

The places are found by following the types of bodies down. A struct with a `type` is tried as each that it may be where
it stands, because what is checked, and what is read, goes by it.
"""

from __future__ import annotations

import json
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
from http_rig import Rig
from route_bodies import NEVER_VALID, VALUES, WITH_BODY, answering, body_with, check_refusal, post

from octavo.api_server.http.routes import Route

HOLE = "the hole"
KINDS = {  # field -> types of structs in it
    "content": ("text", "input_text", "output_text", "thinking", "tool_use", "tool_result"),
    "input": ("message", "function_call", "function_call_output", "reasoning"),
    "output": ("output_text",),
    "tools": ("function", "custom"),
    "tool_choice": ("function", "allowed_tools"),
    "tool_calls": ("function",),
    "response_format": ("text", "json_object", "json_schema"),
    "format": ("text", "json_object", "json_schema"),
}
NAMES = frozenset({"id", "name", "role", "call_id", "tool_use_id", "tool_call_id"})  # always there
WORDS = {"role": "user", "type": "text", "arguments": "{}", "input": {}, "input_schema": {}}  # right ones, by field


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with answering(tmp_path) as rig:
        yield rig


def members(kind: Any) -> Iterator[Any]:
    """The types of a union, without their ranges."""
    if get_origin(kind) is Annotated:
        yield from members(get_args(kind)[0])
    elif get_origin(kind) in (Union, types.UnionType):
        for each in get_args(kind):
            yield from members(each)
    else:
        yield kind


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def right_value(name: str, kind: Any) -> Any:
    """A value that the type of the field `name` allows."""
    if name in WORDS:
        return WORDS[name]
    first = next(members(kind))
    if is_struct(first):
        return next(right_structs(first, name))
    if get_origin(first) is Literal:
        return get_args(first)[0]
    return {str: "x", int: 1, float: 0.5, bool: True}.get(first, {} if get_origin(first) is dict else [])


def right_structs(kind: type[msgspec.Struct], name: str) -> Iterator[dict[str, Any]]:
    """Values of a struct in the field `name`, with little more than it needs: one for each `type` that it may have."""
    fields = msgspec.structs.fields(kind)
    needed = [field for field in fields if field.required or field.encode_name in NAMES]
    value = {field.encode_name: right_value(field.encode_name, field.type) for field in needed}
    has_open_type = any(field.encode_name == "type" and str in members(field.type) for field in fields)
    for each in KINDS.get(name, ("text",)) if has_open_type else ():
        yield {**value, "type": each}
    if not has_open_type:
        yield value


def places(name: str, kind: Any, inside: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Values of the field `name` that have HOLE in one place below their top. A struct is not looked for in itself."""
    for member in members(kind):
        if is_struct(member) and member not in inside:
            for value in right_structs(member, name):
                for field in msgspec.structs.fields(member):
                    for inner in (HOLE, *places(field.encode_name, field.type, (*inside, member))):
                        yield {**value, field.encode_name: inner}
        elif get_origin(member) is list:
            yield from ([inner] for inner in (HOLE, *places(name, get_args(member)[0], inside)))
        elif get_origin(member) is dict:
            yield from ({"1": inner} for inner in (HOLE, *places(name, get_args(member)[1], inside)))


def fields_with_places(route: Route) -> Iterator[tuple[str, str]]:
    """Pairs (field, JSON of its value with a hole)."""
    assert route.body is not None
    for field in msgspec.structs.fields(route.body):
        for place in places(field.encode_name, field.type):
            yield field.encode_name, json.dumps(place)


TRIED = VALUES.keys() - {"Infinity", "huge", "list of lists", "lone surrogate inside", "list of emoji", "long text"}
WITH_PLACES = [route for route in WITH_BODY if next(fields_with_places(route), None)]


@pytest.mark.parametrize("value", sorted(TRIED))
@pytest.mark.parametrize("route", WITH_PLACES, ids=lambda route: route.path)
async def test_no_value_in_any_place_is_more_than_a_refusal(rig: Rig, route: Route, value: str) -> None:
    for name, place in fields_with_places(route):
        status, answer = await post(rig, route, body_with(route, name, place.replace(f'"{HOLE}"', VALUES[value])))
        if status == 200:
            assert value not in NEVER_VALID, (name, place, answer)
        else:
            check_refusal(status, answer, name)


def test_places_are_found_at_every_depth() -> None:
    chat = next(route for route in WITH_BODY if route.path == "/v1/chat/completions")
    found = [json.loads(place) for name, place in fields_with_places(chat) if name == "messages"]
    assert [HOLE] in found
    for inner in (
        f'"role": "{HOLE}"',
        f'"content": [{{"type": "text", "text": "{HOLE}"',
        f'"function": {{"name": "x", "arguments": "{HOLE}"}}',
    ):
        assert any(inner in json.dumps(conversation) for conversation in found), inner
