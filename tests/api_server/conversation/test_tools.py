"""Checks of tools and of the choice among them: what passes, and which field an error names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.api_server.conversation.tools import (
    MAX_PARAMETERS_BYTES,
    MAX_PARAMETERS_DEPTH,
    MAX_TOOLS,
    Mode,
    Tool,
    ToolChoice,
    ToolFields,
    ToolUse,
    resolve_tools,
    template_tools,
)
from octavo.api_server.errors import ApiError, ErrorKind


class Body(msgspec.Struct):
    """The fields as a body has them."""

    tools: list[Tool] | None = None
    tool_choice: Mode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def resolve(*tools: Any, **fields: Any) -> ToolUse:
    body = msgspec.convert({"tools": list(tools), **fields}, Body)
    return resolve_tools(body.tools, body.tool_choice, body.parallel_tool_calls)


def names(tools: tuple[Tool, ...]) -> list[str]:
    return [each.name for each in tools]


def refusal(*tools: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        resolve(*tools, **fields)
    return caught.value


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_no_tools() -> None:
    for use in (resolve(), resolve_tools(None), resolve(tool_choice="auto"), resolve(tool_choice="none")):
        assert use == ToolUse()


@pytest.mark.parametrize(
    ("choice", "shown", "callable_", "is_forced"),
    [
        (None, ["f", "g"], ["f", "g"], False),
        ("auto", ["f", "g"], ["f", "g"], False),
        ("none", [], [], False),
        ("required", ["f", "g"], ["f", "g"], True),
        (named("g"), ["f", "g"], ["g"], True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("g")]}}, ["f", "g"], ["g"], False),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("f")]}},
            ["f", "g"],
            ["f"],
            True,
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, [], [], False),
    ],
)
def test_choices(choice: Any, shown: list[str], callable_: list[str], is_forced: bool) -> None:
    use = resolve(tool("f"), tool("g"), tool_choice=choice)
    assert (names(use.tools), names(use.callable_tools), use.is_forced) == (shown, callable_, is_forced)


@pytest.mark.parametrize(("given", "is_parallel"), [(None, True), (True, True), (False, False)])
def test_parallel_calls(given: bool | None, is_parallel: bool) -> None:
    assert resolve(tool(), parallel_tool_calls=given).is_parallel is is_parallel


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", "a/b", "é", "a\n", "<f>"])
def test_names(name: str) -> None:
    error = refusal(tool(), tool(name))
    assert (error.kind, error.param) == (ErrorKind.INVALID_VALUE, "tools[1].function.name")


def test_names_that_are_allowed() -> None:
    assert names(resolve(tool("a-Z_0.9"), tool("x" * 128)).tools) == ["a-Z_0.9", "x" * 128]


def test_a_name_may_stand_once() -> None:
    assert refusal(tool(), tool()).param == "tools[1].function.name"


def test_the_number_of_tools() -> None:
    many = [tool(f"f{number}") for number in range(MAX_TOOLS + 1)]
    assert len(resolve(*many[:-1]).tools) == MAX_TOOLS
    assert refusal(*many).param == "tools"


@pytest.mark.parametrize(
    "parameters",
    [nested(MAX_PARAMETERS_DEPTH + 1), {"type": "string"}, {"type": ["object"]}, {"a": "x" * MAX_PARAMETERS_BYTES}],
)
def test_parameters(parameters: dict[str, Any]) -> None:
    error = refusal(tool(parameters=parameters))
    assert (error.kind, error.param) == (ErrorKind.INVALID_VALUE, "tools[0].function.parameters")


def test_parameters_that_are_allowed() -> None:
    for parameters in (
        None,
        {},
        {"type": "object"},
        nested(MAX_PARAMETERS_DEPTH),
        {"a": "x" * (MAX_PARAMETERS_BYTES - 8)},
    ):
        assert resolve(tool(parameters=parameters, strict=True)).tools[0].parameters == (parameters or {})


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        (named("h"), "tool_choice.function.name"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "custom"}, "tool_choice.type"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("f"), named("h")]}},
            "tool_choice.allowed_tools.tools[1]",
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "tool_choice"),
    ],
)
def test_choices_that_cannot_be(choice: Any, param: str) -> None:
    assert refusal(tool("f"), tool_choice=choice).param == param


def test_a_call_cannot_be_forced_without_tools() -> None:
    assert refusal(tool_choice="required").param == "tool_choice"
    assert refusal(tool_choice=named("f")).param == "tool_choice.function.name"


def test_other_kinds_of_tools() -> None:
    error = refusal({**tool(), "type": "web_search"})
    assert (error.kind, error.param) == (ErrorKind.UNSUPPORTED, "tools[0].type")


def test_a_route_has_its_own_names_for_the_fields() -> None:
    fields = ToolFields(name="name", parameters="input_schema")
    body = msgspec.convert({"tools": [tool(parameters={"type": "array"})]}, Body)
    with pytest.raises(ApiError) as caught:
        resolve_tools(body.tools, fields=fields)
    assert caught.value.param == "tools[0].input_schema"


@pytest.mark.parametrize(
    "wrong",
    [
        tool(1),
        tool(parameters=[]),
        tool(strict="yes"),
        tool(description=3),
        {"type": "function"},
        {"function": {}},
        "f",
        None,
    ],
)
def test_wrong_types_do_not_decode(wrong: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"tools": [wrong]}, Body)


def test_templates_get_what_is_meant_for_the_model() -> None:
    given = [tool("f", description="d", parameters={"type": "object"}, strict=True), tool("g")]
    body = msgspec.convert({"tools": given}, Body)
    assert template_tools(body.tools or []) == [tool("f", description="d", parameters={"type": "object"}), tool("g")]
