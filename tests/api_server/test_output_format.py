"""Which parser reads an output: by flags, template, tools and prompt."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.api_server.chat_template import ChatTemplate
from octavo.api_server.conversation.tools import FunctionSpec, Tool, ToolUse
from octavo.api_server.errors import ApiError
from octavo.api_server.generation.parsing import OutputFormat, check_tool_use
from octavo.api_server.parsers.base import Content, Event, Reasoning, ToolCall, join_events
from octavo.protocol.config import ApiConfig, ParserName
from octavo.protocol.lifecycle import ExitCode, StartupError

TOOLS = (Tool(function=FunctionSpec(name="f")),)
USE = ToolUse(TOOLS, TOOLS)
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
LLAMA_CALL = '{"name": "f", "parameters": {}}'
CALL = [ToolCall("f", "{}")]
THOUGHT = "<think>why</think>so"
PLAIN = "{{ messages }}"


def output_format(template: str | None, **flags: Any) -> OutputFormat:
    return OutputFormat(None if template is None else ChatTemplate(template, {}), ApiConfig(**flags), (2,))


def read(form: OutputFormat, use: ToolUse, text: str, prompt: str = "") -> list[Event] | None:
    """Events of `text`; None when nobody parses it."""
    reading = form.reading(use, prompt)
    if reading is None:
        return None
    parser = reading.new_parser()
    return join_events([*parser.push(text), *parser.finish(is_cut=False)])


@pytest.mark.parametrize("template", [None, PLAIN, "{{ tools }}<tool_call>", "{{ tools }}<|python_tag|>"])
def test_without_tools_calls_are_text(template: str | None) -> None:
    form = output_format(template)
    for text in (HERMES_CALL, LLAMA_CALL):
        assert read(form, ToolUse(), text) in (None, [Content(text)])


@pytest.mark.parametrize(
    ("template", "is_parsed"), [(PLAIN, False), ("{{ tools }}<|python_tag|>", False), ("<think>", True)]
)
def test_an_output_that_cannot_have_thoughts_or_calls_is_not_parsed(template: str, is_parsed: bool) -> None:
    assert (output_format(template).reading(ToolUse(), "") is not None) is is_parsed


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (None, HERMES_CALL),
        (PLAIN, HERMES_CALL),
        ("<think>", HERMES_CALL),
        ("{{ tools }}<tool_call>", HERMES_CALL),
        ("{{ tools }}<|python_tag|>", LLAMA_CALL),
        ("no word about them, <|python_tag|>", HERMES_CALL),
    ],
)
def test_calls_are_read_in_the_format_that_the_prompt_asks_for(template: str | None, text: str) -> None:
    assert read(output_format(template), USE, text) == CALL


def test_the_operator_knows_better_than_the_template() -> None:
    assert read(output_format(PLAIN, tool_call_parser=ParserName.LLAMA_JSON), USE, LLAMA_CALL) == CALL
    form = output_format("{{ tools }}<tool_call>", tool_call_parser=ParserName.LLAMA_JSON)
    assert read(form, USE, HERMES_CALL) == [Content(HERMES_CALL)]


def test_the_operator_switches_off_calls_or_thoughts() -> None:
    text = THOUGHT + HERMES_CALL
    template = "{{ tools }}<tool_call><think>"
    assert read(output_format(template), USE, text) == [Reasoning("why"), Content("so"), *CALL]
    without_calls = output_format(template, tool_call_parser=ParserName.NONE)
    assert read(without_calls, USE, text) == [Reasoning("why"), Content("so" + HERMES_CALL)]
    without_thoughts = output_format(template, reasoning_parser=ParserName.NONE)
    assert read(without_thoughts, USE, text) == [Content(THOUGHT), *CALL]
    without_both = output_format(template, tool_call_parser=ParserName.NONE, reasoning_parser=ParserName.NONE)
    assert read(without_both, USE, text) is None


@pytest.mark.parametrize(
    ("prompt", "events"), [("<think>\n", [Reasoning("why"), Content("so")]), ("", [Content("why</think>so")])]
)
def test_the_prompt_may_have_begun_the_thought(prompt: str, events: list[Event]) -> None:
    assert read(output_format("<think>"), ToolUse(), "why</think>so", prompt) == events


def test_a_parser_may_need_the_end_of_the_prompt() -> None:
    events = [Reasoning("why"), Content("so")]
    for prompt in ("<think>", "[THINK]"):
        closing = prompt.replace("<", "</").replace("[", "[/")
        assert read(output_format("[TOOL_CALLS]"), ToolUse(), f"why{closing}so", "x" * 100 + prompt) == events


def test_a_parser_knows_which_tools_may_be_called() -> None:
    other = Tool(function=FunctionSpec(name="g"))
    form = output_format("{{ tools }}<|python_tag|>")
    assert read(form, ToolUse((*TOOLS, other), TOOLS), LLAMA_CALL) == CALL
    assert read(form, ToolUse((*TOOLS, other), (other,)), LLAMA_CALL) == [Content(LLAMA_CALL)]


def test_every_choice_has_a_parser_of_its_own() -> None:
    reading = output_format("<think>").reading(ToolUse(), "")
    assert reading is not None
    first, second = reading.new_parser(), reading.new_parser()
    assert first.push("<think>a") == [Reasoning("a")]
    assert second.push("b") == [Content("b")]


def test_what_else_the_request_says_about_calls_goes_along() -> None:
    reading = output_format(PLAIN).reading(ToolUse(TOOLS, TOOLS, is_parallel=False), "")
    assert reading is not None
    assert not reading.is_parallel
    assert reading.skipped_ids == {2}


def test_parsers_that_do_not_go_together_end_the_start() -> None:
    with pytest.raises(StartupError, match="--reasoning-parser mistral does not go with") as caught:
        output_format(PLAIN, tool_call_parser=ParserName.GLM, reasoning_parser=ParserName.MISTRAL)
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_forced_call_is_refused_by_the_name_that_the_route_has_for_it() -> None:
    check_tool_use(USE, "choice")
    with pytest.raises(ApiError, match="needs grammars") as caught:
        check_tool_use(ToolUse(TOOLS, TOOLS, is_forced=True), "choice")
    assert (caught.value.status, caught.value.param) == (400, "choice")
