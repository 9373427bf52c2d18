"""Tools in words, for templates that know none."""

from __future__ import annotations

from typing import Any

from parser_checks import TOOLS

from octavo.api_server.conversation.tool_prompt import spell_out_tools

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": {}}}
OTHER_CALL = {"id": "2", "type": "function", "function": {"name": 'a"b', "arguments": '{"city": "Oslo"}'}}


def test_tools_go_into_a_system_message() -> None:
    system, user = spell_out_tools([USER], TOOLS)
    assert user is USER
    assert system["role"] == "system"
    lines = system["content"].split("\n")
    assert lines[0] == "# Tools"
    assert '{"type":"function","function":{"name":"get_time"}}' in lines
    assert lines[-3:] == ["<tool_call>", '{"name": <function-name>, "arguments": <args-json-object>}', "</tool_call>"]


def test_a_system_message_keeps_what_it_says() -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    system, _ = spell_out_tools(messages, TOOLS)
    assert system["content"].startswith("Be brief.\n\n# Tools\n")
    assert messages[0]["content"] == "Be brief."
    assert spell_out_tools([{"role": "system", "content": ""}], TOOLS)[0]["content"].startswith("# Tools\n")


def test_calls_and_answers_of_earlier_turns() -> None:
    messages: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL, OTHER_CALL]},
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
        {"role": "tool", "content": "fog", "tool_call_id": "2"},
        {"role": "assistant", "content": "Well.", "tool_calls": [CALL]},
        {"role": "tool", "content": "12:01", "tool_call_id": "1"},
        {"role": "assistant", "content": "Fog at noon."},
    ]
    assert spell_out_tools(messages, ()) == [
        USER,
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "a\\"b", "arguments": {"city": "Oslo"}}\n</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\n12:00\n</tool_response>\n<tool_response>\nfog\n</tool_response>",
        },
        {"role": "assistant", "content": 'Well.\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'},
        {"role": "user", "content": "<tool_response>\n12:01\n</tool_response>"},
        {"role": "assistant", "content": "Fog at noon."},
    ]
    assert "tool_calls" in messages[1]


def test_nothing_to_say() -> None:
    assert spell_out_tools([USER], ()) == [USER]
    assert spell_out_tools([], TOOLS)[0]["role"] == "system"
