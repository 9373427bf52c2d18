"""The messages of a conversation in one form, whatever API they came in by, and what a chat template gets of them.

Templates differ in what they take, so they get the least: text as one string, and no key that the client did not give.
Arguments of calls are objects there, because templates print them as JSON themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.api_server.errors import invalid_value

SYSTEM, USER, ASSISTANT, TOOL = ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 2048
MAX_ARGUMENTS_DEPTH = 64


class PastCall(msgspec.Struct, frozen=True):
    """A call that the assistant made."""

    id: str | None
    name: str
    arguments: dict[str, Any]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message.

    Attributes:
        role: one of ROLES.
        reasoning: what the assistant thought before it said `content`.
        tool_call_id: the call whose result this is.
    """

    role: str
    content: str = ""
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[PastCall, ...] = ()
    tool_call_id: str | None = None


def check_number_of_messages(num_messages: int, param: str) -> None:
    """Raise ApiError that names `param` unless so many messages are allowed."""
    if not 1 <= num_messages <= MAX_MESSAGES:
        raise invalid_value(param, f"must have 1 to {MAX_MESSAGES} messages, has {num_messages}")


def decode_arguments(text: str | None, param: str) -> dict[str, Any]:
    """Return the arguments of a past call from their JSON text, none if there is none; ApiError names `param`."""
    too_deep = invalid_value(param, f"is nested more than {MAX_ARGUMENTS_DEPTH} levels deep")
    try:
        arguments = msgspec.json.decode(text or "{}", type=dict)
    except msgspec.MsgspecError:
        raise invalid_value(param, "must be the text of a JSON object") from None
    except RecursionError:
        raise too_deep from None
    if depth_of(arguments) > MAX_ARGUMENTS_DEPTH:
        raise too_deep
    return arguments


def depth_of(value: Any) -> int:
    """Return how many objects and arrays are nested; a scalar has none."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
    return depth


def to_template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return what the template gets."""
    return [_to_template_message(message) for message in messages]


def _to_template_message(message: Message) -> dict[str, Any]:
    optional = {
        "name": message.name,
        "reasoning_content": message.reasoning,
        "tool_calls": [_to_template_call(call) for call in message.tool_calls] or None,
        "tool_call_id": message.tool_call_id,
    }
    given = {key: value for key, value in optional.items() if value is not None}
    return {"role": message.role, "content": message.content, **given}


def _to_template_call(call: PastCall) -> dict[str, Any]:
    result: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    return result if call.id is None else {"id": call.id, **result}
