"""Anthropic's bodies to messages, tools and drafts; what is wrong is named by its place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.api_server.anthropic.input import conversation_of, tool_use_of
from octavo.api_server.anthropic.messages import MessagesFormat
from octavo.api_server.anthropic.schemas import MessagesRequest
from octavo.api_server.conversation.messages import Message, PastCall
from octavo.api_server.errors import ApiError, ErrorKind
from octavo.api_server.generation.job import Conversation

USER = {"role": "user", "content": "Hi"}


def request_of(*messages: dict[str, Any], **fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 9, "messages": messages or (USER,), **fields}
    return msgspec.convert(body, MessagesRequest)


def read(*messages: dict[str, Any], **fields: Any) -> Conversation:
    return conversation_of(request_of(*messages, **fields))


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": blocks}


def test_the_system_comes_first() -> None:
    expected = (Message(role="system", content="Be\nbrief."), Message(role="user", content="Hi"))
    blocks = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    assert read(USER, system=blocks).messages == expected
    assert read(USER, system="Be\nbrief.").messages == expected


def test_results_of_tools_are_messages_of_their_own() -> None:
    content = [{"type": "text", "text": "5"}, {"type": "text", "text": "C"}]
    messages = read(
        user(
            {"type": "tool_result", "tool_use_id": "a", "content": "20"},
            {"type": "tool_result", "tool_use_id": "b", "content": content, "is_error": False},
            {"type": "tool_result", "tool_use_id": "c"},
            {"type": "text", "text": "And"},
            {"type": "text", "text": "now?"},
        )
    ).messages
    assert messages == (
        Message(role="tool", content="20", tool_call_id="a"),
        Message(role="tool", content="5\nC", tool_call_id="b"),
        Message(role="tool", content="", tool_call_id="c"),
        Message(role="user", content="And\nnow?"),
    )


def test_what_the_assistant_thought_said_and_called_is_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Rome.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Looking."},
        {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Rome"}},
    ]
    conversation = read(USER, {"role": "assistant", "content": blocks})
    assert conversation.messages[1] == Message(
        role="assistant",
        content="Looking.",
        reasoning="Rome.",
        tool_calls=(PastCall("a", "get_weather", {"city": "Rome"}),),
    )
    assert (conversation.continues_final_message, conversation.adds_generation_prompt) == (False, True)


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    conversation = read(USER, {"role": "assistant", "content": "The answer is"})
    assert (conversation.continues_final_message, conversation.adds_generation_prompt) == (True, False)
    conversation = read(USER)
    assert (conversation.continues_final_message, conversation.adds_generation_prompt) == (False, True)


@pytest.mark.parametrize(
    ("thinking", "options"),
    [
        (None, {}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "enabled", "budget_tokens": 8, "display": "summarized"}, {"enable_thinking": True}),
    ],
)
def test_thinking_is_an_option_of_the_template(thinking: Any, options: dict[str, bool]) -> None:
    draft = MessagesFormat("m").draft(request_of(thinking=thinking))
    assert isinstance(draft.prompts, Conversation)
    assert draft.prompts.template_options == options


@pytest.mark.parametrize(
    ("message", "param", "kind"),
    [
        (user(), "messages[0].content", ErrorKind.INVALID_VALUE),
        (user(*[{"type": "text", "text": ""}] * 1025), "messages[0].content", ErrorKind.INVALID_VALUE),
        (user({"type": "text"}), "messages[0].content[0].text", ErrorKind.MISSING_FIELD),
        (user({"type": "image", "source": {}}), "messages[0].content[0].type", ErrorKind.UNSUPPORTED),
        (user({"type": "document", "source": {}}), "messages[0].content[0].type", ErrorKind.UNSUPPORTED),
        (user({"type": "tool_use", "name": "f", "input": {}}), "messages[0].content[0].type", ErrorKind.UNSUPPORTED),
        (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id", ErrorKind.MISSING_FIELD),
        (
            user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
            "messages[0].content[0].content[0].type",
            ErrorKind.UNSUPPORTED,
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "input": {}}]},
            "messages[0].content[0].name",
            ErrorKind.MISSING_FIELD,
        ),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]},
            "messages[0].content[0].input",
            ErrorKind.MISSING_FIELD,
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking"}]},
            "messages[0].content[0].thinking",
            ErrorKind.MISSING_FIELD,
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_place(message: dict[str, Any], param: str, kind: ErrorKind) -> None:
    with pytest.raises(ApiError) as problem:
        read(message)
    assert (problem.value.param, problem.value.kind) == (param, kind)


def test_the_system_is_text() -> None:
    with pytest.raises(ApiError) as problem:
        read(USER, system=[{"type": "image"}])
    assert problem.value.param == "system[0].type"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("container", "c", "container"),
        ("context_management", {}, "context_management"),
        ("mcp_servers", [], "mcp_servers"),
        ("output_config", {"effort": "low"}, "output_config"),
        ("output_format", {"type": "json_schema"}, "output_format"),
        ("thinking", {"type": "enabled", "budget_tokens": 9}, "thinking.budget_tokens"),
        ("thinking", {"type": "adaptive", "display": "omitted"}, "thinking.display"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any, param: str) -> None:
    with pytest.raises(ApiError) as problem:
        MessagesFormat("m").draft(request_of(**{field: value}))
    assert problem.value.param == param


def test_the_draft_has_what_the_body_says() -> None:
    draft = MessagesFormat("m").draft(
        request_of(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"], stream=True)
    )
    sampling = draft.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 7)
    assert (draft.stop, draft.rendering.is_streamed) == (("a", "b"), True)
    assert (draft.param("prompt"), draft.param("stop")) == ("messages", "stop_sequences")


TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}


def test_tools_mean_the_same_as_openais() -> None:
    use = tool_use_of(request_of(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}))
    (tool,) = use.tools
    assert (tool.name, tool.function.description, tool.parameters) == ("f", "d", TOOL["input_schema"])
    assert (use.is_forced, use.is_parallel) == (False, False)
    assert tool_use_of(request_of(tools=[TOOL])).is_parallel
    assert tool_use_of(request_of(tools=[TOOL], tool_choice={"type": "any"})).is_forced
    assert tool_use_of(request_of(tools=[TOOL], tool_choice={"type": "tool", "name": "f"})).is_forced
    assert tool_use_of(request_of(tools=[TOOL], tool_choice={"type": "none"})).tools == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "name": "f g"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_what_is_wrong_with_tools_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as problem:
        MessagesFormat("m").draft(request_of(**fields))
    assert problem.value.param == param
