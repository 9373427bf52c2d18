"""Ids of earlier calls, as the templates of some models want them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.api_server.conversation.call_ids import with_fitting_ids


def call(name: str, call_id: str | None) -> dict[str, Any]:
    function = {"name": name, "arguments": {}}
    return {"type": "function", "function": function} if call_id is None else {"id": call_id, "function": function}


def turns(*ids: str | None) -> list[dict[str, Any]]:
    """Two turns of calls, each followed by its results; the client numbers both alike."""
    calls = [call("f", ids[0]), call("g", ids[1])]
    results = [{"role": "tool", "tool_call_id": each, "content": ""} for each in ids]
    turn = [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    return [{"role": "user", "content": "Hi"}, *turn, *turn]


def ids_of(messages: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    calls = [each["id"] for message in messages for each in message.get("tool_calls", ())]
    return calls, [message["tool_call_id"] for message in messages if message["role"] == "tool"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '[TOOL_CALLS]' }}", ["000000000", "000000001", "000000002", "000000003"]),
        ("<|tool_calls_section_begin|>", ["functions.f:0", "functions.g:1", "functions.f:2", "functions.g:3"]),
        ("<tool_call>", ["call_a", "call_b", "call_a", "call_b"]),
    ],
)
def test_calls_and_their_results_have_ids_of_the_template(source: str, expected: list[str]) -> None:
    messages = turns("call_a", "call_b")
    assert ids_of(with_fitting_ids(messages, source)) == (expected, expected)
    assert messages == turns("call_a", "call_b"), "what was given has changed"


def test_a_call_and_its_result_get_an_id_if_the_client_has_none() -> None:
    messages = [{"role": "assistant", "tool_calls": [call("f", None)]}, {"role": "tool", "content": ""}]
    assert ids_of(with_fitting_ids(messages, "[TOOL_CALLS]")) == (["000000000"], ["000000000"])


def test_a_result_without_its_call_keeps_its_id() -> None:
    messages = [{"role": "tool", "tool_call_id": "x", "content": ""}]
    assert with_fitting_ids(messages, "[TOOL_CALLS]") == messages
