"""Items to messages: turns of the assistant are joined, and what is wrong is named by its place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.api_server.conversation.messages import Message, PastCall
from octavo.api_server.errors import ApiError, ErrorKind
from octavo.api_server.openai.responses import ResponsesFormat
from octavo.api_server.openai.responses_input import messages_of, tool_use_of
from octavo.api_server.openai.responses_schemas import InputItem, ResponsesRequest


def read(*items: dict[str, Any], instructions: str | None = None) -> tuple[Message, ...]:
    return messages_of(msgspec.convert(items, list[InputItem]), instructions)


def request_of(**fields: Any) -> ResponsesRequest:
    return msgspec.convert({"model": "m", "input": "Hi", **fields}, ResponsesRequest)


def test_a_text_is_the_users() -> None:
    assert messages_of("Hi", None) == (Message(role="user", content="Hi"),)


def test_the_type_of_a_message_may_be_left_out() -> None:
    assert read({"role": "user", "content": "Hi"}) == read({"type": "message", "role": "user", "content": "Hi"})


def test_parts_are_lines() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}, {"type": "text", "text": "c"}]
    assert read({"role": "user", "content": parts})[0].content == "a\nb\nc"


def test_instructions_come_first_and_into_the_systems_message() -> None:
    assert read({"role": "user", "content": "Hi"}, instructions="Be brief.")[0] == Message(
        role="system", content="Be brief."
    )
    (first, second) = read(
        {"role": "developer", "content": "Say it in French."},
        {"role": "user", "content": "Hi"},
        instructions="Be brief.",
    )
    assert first == Message(role="system", content="Be brief.\n\nSay it in French.")
    assert second.role == "user"


def test_what_the_assistant_thought_said_and_called_is_one_message() -> None:
    messages = read(
        {"role": "user", "content": "Rome and Oslo?"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Two calls."}]},
        {"role": "assistant", "content": "Looking.", "phase": "commentary"},
        {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "b", "name": "get_weather", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": "20"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "5"}]},
        {"role": "assistant", "content": "20 and 5."},
    )
    assert messages == (
        Message(role="user", content="Rome and Oslo?"),
        Message(
            role="assistant",
            content="Looking.",
            reasoning="Two calls.",
            tool_calls=(PastCall("a", "get_weather", {"city": "Rome"}), PastCall("b", "get_weather", {})),
        ),
        Message(role="tool", content="20", tool_call_id="a"),
        Message(role="tool", content="5", tool_call_id="b"),
        Message(role="assistant", content="20 and 5."),
    )


def test_thoughts_that_are_encrypted_are_left_out() -> None:
    items = ({"role": "user", "content": "Hi"}, {"type": "reasoning", "summary": [], "encrypted_content": "x"})
    assert read(*items) == read(items[0])


@pytest.mark.parametrize(
    ("item", "param", "kind"),
    [
        ({"role": "critic", "content": "x"}, "input[1].role", ErrorKind.INVALID_VALUE),
        ({"content": "x"}, "input[1].role", ErrorKind.INVALID_VALUE),
        ({"role": "user"}, "input[1].content", ErrorKind.MISSING_FIELD),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
            "input[1].content[0].type",
            ErrorKind.UNSUPPORTED,
        ),
        (
            {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]},
            "input[1].content[0].type",
            ErrorKind.UNSUPPORTED,
        ),
        (
            {"role": "user", "content": [{"type": "input_audio"}]},
            "input[1].content[0].type",
            ErrorKind.UNSUPPORTED,
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "input[1].content[0].text", ErrorKind.MISSING_FIELD),
        ({"role": "user", "content": [{"type": "text", "text": ""}] * 65}, "input[1].content", ErrorKind.INVALID_VALUE),
        ({"type": "function_call", "arguments": "{}"}, "input[1].name", ErrorKind.MISSING_FIELD),
        ({"type": "function_call", "name": "f", "arguments": "[]"}, "input[1].arguments", ErrorKind.INVALID_VALUE),
        ({"type": "function_call", "name": "f", "arguments": "{"}, "input[1].arguments", ErrorKind.INVALID_VALUE),
        ({"type": "function_call_output", "output": "x"}, "input[1].call_id", ErrorKind.MISSING_FIELD),
        ({"type": "function_call_output", "call_id": "a"}, "input[1].output", ErrorKind.MISSING_FIELD),
        ({"type": "item_reference", "id": "x"}, "input[1].type", ErrorKind.UNSUPPORTED),
        ({"type": "web_search_call"}, "input[1].type", ErrorKind.UNSUPPORTED),
    ],
)
def test_what_is_wrong_is_named_by_its_place(item: dict[str, Any], param: str, kind: ErrorKind) -> None:
    with pytest.raises(ApiError) as problem:
        read({"role": "user", "content": "Hi"}, item)
    assert (problem.value.param, problem.value.kind) == (param, kind)
    assert param in problem.value.message


def test_an_empty_list_is_no_conversation() -> None:
    with pytest.raises(ApiError) as problem:
        read()
    assert problem.value.param == "input"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("store", True, "store"),
        ("background", True, "background"),
        ("truncation", "auto", "truncation"),
        ("previous_response_id", "resp_1", "previous_response_id"),
        ("conversation", "conv_1", "conversation"),
        ("prompt", {"id": "p"}, "prompt"),
        ("context_management", [{"type": "compaction"}], "context_management"),
        ("text", {"format": {"type": "json_object"}}, "text.format"),
        ("text", {"format": {"type": "json_schema", "name": "x", "schema": {}}}, "text.format"),
        ("text", {"verbosity": "low"}, "text.verbosity"),
        ("include", ["file_search_call.results"], "include[0]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, value: Any, param: str) -> None:
    with pytest.raises(ApiError) as problem:
        ResponsesFormat("m").draft(request_of(**{field: value}))
    assert (problem.value.kind, problem.value.param) == (ErrorKind.UNSUPPORTED, param)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", False),
        ("background", False),
        ("truncation", "disabled"),
        ("context_management", []),
        ("text", {"format": {"type": "text"}, "verbosity": "medium"}),
        ("include", ["reasoning.encrypted_content"]),
        ("tools", []),
        ("service_tier", "auto"),
        ("max_tool_calls", 3),
        ("stream_options", {"include_obfuscation": False}),
    ],
)
def test_values_that_change_nothing_pass(field: str, value: Any) -> None:
    assert ResponsesFormat("m").draft(request_of(**{field: value})) == ResponsesFormat("m").draft(request_of())


def test_the_draft_has_what_the_body_says() -> None:
    body = request_of(
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        stream=True,
        top_logprobs=2,
        priority=-1,
        cache_salt="s",
        reasoning={"effort": "low"},
    )
    draft = ResponsesFormat("m").draft(body)
    sampling = draft.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.5, 0.9, 7)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (3, 0.1, 0.2)
    assert (draft.rendering.is_streamed, draft.rendering.num_logprobs) == (True, 2)
    assert (draft.priority, draft.cache_salt) == (-1, "s")
    assert draft.prompts.template_options == {"reasoning_effort": "low"}  # type: ignore[union-attr]
    assert draft.param("max_tokens") == "max_output_tokens"


def test_logprobs_are_asked_for_by_include_too() -> None:
    draft = ResponsesFormat("m").draft(request_of(include=["message.output_text.logprobs"]))
    assert draft.rendering.num_logprobs == 0


def test_tools_are_flat_and_mean_the_same_as_nested_ones() -> None:
    parameters = {"type": "object", "properties": {}}
    tools = [{"type": "function", "name": name, "parameters": parameters, "strict": True} for name in ("f", "g")]
    use = tool_use_of(request_of(tools=tools, parallel_tool_calls=False))
    assert [(tool.name, tool.parameters, tool.function.strict) for tool in use.tools] == [
        ("f", parameters, True),
        ("g", parameters, True),
    ]
    assert (use.is_forced, use.is_parallel) == (False, False)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    assert [tool.name for tool in tool_use_of(request_of(tools=tools, tool_choice=allowed)).callable_tools] == ["g"]
    assert tool_use_of(request_of(tools=tools, tool_choice="none")).tools == ()
    assert tool_use_of(request_of(tools=tools, tool_choice={"type": "function", "name": "f"})).is_forced


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "name": "f"}, {"type": "function", "name": "f"}], "tools[1].name"),
        ([{"type": "function", "name": "f", "parameters": {"type": "array"}}], "tools[0].parameters"),
    ],
)
def test_what_is_wrong_with_tools_is_named(tools: list[Any], param: str) -> None:
    with pytest.raises(ApiError) as problem:
        ResponsesFormat("m").draft(request_of(tools=tools))
    assert problem.value.param == param


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_calls_cannot_be_forced_yet(choice: Any) -> None:
    tools = [{"type": "function", "name": "f"}]
    with pytest.raises(ApiError) as problem:
        ResponsesFormat("m").draft(request_of(tools=tools, tool_choice=choice))
    assert (problem.value.kind, problem.value.param) == (ErrorKind.UNSUPPORTED, "tool_choice")
