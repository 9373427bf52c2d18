"""Ids of calls in the form that some templates insist on, whatever ids the client has for them.

Clients keep the ids that answers gave them, or have ids of another server. Mistral's templates refuse all but nine
letters or digits, and Kimi's model reads the name of the tool from the id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FORMS = (  # what only such a template writes -> the id of the call with this name and number in the conversation
    ("[TOOL_CALLS]", "{number:09}"),
    ("<|tool_calls_section_begin|>", "functions.{name}:{number}"),
)

Message = dict[str, Any]


def with_fitting_ids(messages: Sequence[Message], template_source: str) -> list[Message]:
    """Return messages for a template, their calls numbered where its source insists on a form.

    The result of a call carries the id of the last call before it that had the client's id for it.
    """
    form = next((form for marker, form in FORMS if marker in template_source), None)
    return [*messages] if form is None else _Numbering(form).apply(messages)


class _Numbering:
    def __init__(self, form: str) -> None:
        self._form = form
        self._num_calls = 0
        self._new_ids: dict[str | None, str] = {}

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> Message:
        if calls := message.get("tool_calls"):
            return {**message, "tool_calls": [self._call(call) for call in calls]}
        old_id = message.get("tool_call_id")
        return {**message, "tool_call_id": self._new_ids[old_id]} if old_id in self._new_ids else message

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        new_id = self._form.format(name=call["function"]["name"], number=self._num_calls)
        self._num_calls += 1
        self._new_ids[call.get("id")] = new_id
        return {**call, "id": new_id}
