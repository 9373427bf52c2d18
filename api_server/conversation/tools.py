"""Tools that a client offers, and which of them the model may or must call: OpenAI's fields, and what we check of them.

Names may be as those of any of the APIs and of MCP servers, which is more than OpenAI takes: dots, and 128 characters.
The other limits are ours: at most `MAX_TOOLS` tools, parameters of at most `MAX_PARAMETERS_BYTES` and
`MAX_PARAMETERS_DEPTH` levels. Whether the parameters are a proper JSON schema is not checked here: prompts and parsers
only read them, and where a grammar is made of them, the grammar is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from octavo.api_server.conversation.messages import depth_of
from octavo.api_server.errors import invalid_value, unsupported

MAX_TOOLS = 128
MAX_NAME_LENGTH = 128
MAX_PARAMETERS_BYTES = 64 * 1024
MAX_PARAMETERS_DEPTH = 32
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
FUNCTION = "function"
Mode = Literal["none", "auto", "required"]


class FunctionSpec(msgspec.Struct, kw_only=True):
    """`function` of a tool.

    Attributes:
        parameters: JSON schema of the arguments; None means that there are none.
        strict: a grammar made of `parameters` knows every keyword in it, or the request is refused.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """One of `tools`."""

    type: str = FUNCTION
    function: FunctionSpec

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments; empty when the client gave none."""
        return self.function.parameters or {}


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    type: str = FUNCTION
    function: NamedFunction


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(msgspec.Struct, kw_only=True):
    """`tool_choice` when it is an object: one function that must be called, or some of the tools that may be."""

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ToolUse(msgspec.Struct, frozen=True):
    """What a request allows the model to call, after all checks.

    Attributes:
        tools: what the prompt shows the model. With `tool_choice` "none" nothing, which is the surest way.
        callable_tools: those of them that it may call.
        is_forced: it must call one of them and say nothing else.
        is_parallel: it may call several in one answer.
    """

    tools: tuple[Tool, ...] = ()
    callable_tools: tuple[Tool, ...] = ()
    is_forced: bool = False
    is_parallel: bool = True


class ToolFields(NamedTuple):
    """What the route calls the fields, for errors: OpenAI's chat unless told otherwise."""

    tools: str = "tools"
    name: str = "function.name"
    parameters: str = "function.parameters"
    tool_choice: str = "tool_choice"


CHAT_FIELDS = ToolFields()


def resolve_tools(
    tools: list[Tool] | None,
    tool_choice: Mode | ToolChoice | None = None,
    parallel_tool_calls: bool | None = None,
    fields: ToolFields = CHAT_FIELDS,
) -> ToolUse:
    """Check tools and choice, and say what they mean together; raise ApiError that names the field."""
    _check_tools(tools or [], fields)
    offered = tuple(tools or ())
    chosen, is_forced = _choose(offered, tool_choice or "auto", fields.tool_choice)
    if is_forced and not chosen:
        raise invalid_value(fields.tool_choice, "asks for a call, but there are no tools")
    is_parallel = parallel_tool_calls is not False
    return ToolUse(offered if chosen else (), chosen, is_forced, is_parallel)


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return what chat templates get as `tools`: OpenAI's form, without what is meant for the server."""
    return [{"type": FUNCTION, "function": _without_server_fields(tool.function)} for tool in tools]


def _without_server_fields(function: FunctionSpec) -> dict[str, Any]:
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}


def _choose(offered: tuple[Tool, ...], choice: Mode | ToolChoice, param: str) -> tuple[tuple[Tool, ...], bool]:
    """Return the tools that may be called, and whether one must be."""
    if not isinstance(choice, ToolChoice):
        return (() if choice == "none" else offered), choice == "required"
    if choice.type == FUNCTION:
        if choice.function is None:
            raise invalid_value(f"{param}.function", "is required")
        return (_named(offered, choice.function.name, f"{param}.function.name"),), True
    if choice.type != "allowed_tools":
        raise unsupported(f"{param}.type", "must be function or allowed_tools")
    allowed = choice.allowed_tools
    if allowed is None:
        raise invalid_value(f"{param}.allowed_tools", "is required")
    where = f"{param}.allowed_tools.tools"
    names = [_named(offered, each.function.name, f"{where}[{index}]") for index, each in enumerate(allowed.tools)]
    return tuple(names), allowed.mode == "required"


def _named(offered: tuple[Tool, ...], name: str, param: str) -> Tool:
    for tool in offered:
        if tool.name == name:
            return tool
    raise invalid_value(param, "is not the name of one of the tools")


def _check_tools(tools: list[Tool], fields: ToolFields) -> None:
    if len(tools) > MAX_TOOLS:
        raise invalid_value(fields.tools, f"has {len(tools)} tools, at most {MAX_TOOLS}")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        param = f"{fields.tools}[{index}]"
        if tool.type != FUNCTION:
            raise unsupported(f"{param}.type", "must be function: this server has no tools of its own")
        _check_name(tool.name, f"{param}.{fields.name}")
        if tool.name in names:
            raise invalid_value(f"{param}.{fields.name}", "is the name of an earlier tool as well")
        names.add(tool.name)
        if problem := _problem_of(tool.parameters):
            raise invalid_value(f"{param}.{fields.parameters}", problem)


def _check_name(name: str, param: str) -> None:
    if not 1 <= len(name) <= MAX_NAME_LENGTH or not NAME_CHARACTERS.issuperset(name):
        raise invalid_value(param, f"must be 1 to {MAX_NAME_LENGTH} letters, digits, underscores, hyphens or dots")


def _problem_of(parameters: dict[str, Any]) -> str:
    """Return what is wrong with the schema of a tool's arguments, "" if nothing is."""
    if parameters.get("type", "object") != "object":
        return "must be a schema of type object"
    if depth_of(parameters) > MAX_PARAMETERS_DEPTH:
        return f"is nested more than {MAX_PARAMETERS_DEPTH} levels deep"
    num_bytes = len(msgspec.json.encode(parameters))
    return f"has {num_bytes} bytes, at most {MAX_PARAMETERS_BYTES}" if num_bytes > MAX_PARAMETERS_BYTES else ""
