"""Kimi K3: a message of control tokens, with elements for thought, response and calls."""

import pytest
from parser_checks import Output, check_damaged, check_linear, check_output, make_spec, read, specs_of

from octavo.api_server.parsers.kimi_k3 import (
    ARGUMENT_END,
    CALL_BEGIN,
    CALL_END,
    MESSAGE_END,
    RESPONSE_BEGIN,
    RESPONSE_END,
    THOUGHT_BEGIN,
    THOUGHT_END,
    TOOLS_BEGIN,
    TOOLS_END,
)

PLAIN, THINKING, TOOLLESS = specs_of("kimi_k3")
MARKERS = (
    *(THOUGHT_BEGIN, THOUGHT_END, RESPONSE_BEGIN, RESPONSE_END, MESSAGE_END, TOOLS_BEGIN, TOOLS_END),
    *(CALL_BEGIN, CALL_END, ARGUMENT_END, "<|sep|>"),
)


def check(text, expected, spec=PLAIN):
    check_output(spec, text, expected, MARKERS)


def message(content="", *calls, thought=None):
    begin = RESPONSE_BEGIN if thought is None else f"{thought}{THOUGHT_END}{RESPONSE_BEGIN}"
    tools = f"{TOOLS_BEGIN}{''.join(calls)}{TOOLS_END}" if calls else ""
    return f"{begin}{content}{RESPONSE_END}{tools}{MESSAGE_END}"


def call(name, *arguments):
    return f'{CALL_BEGIN}tool="{name}" index="1"<|sep|>{"".join(arguments)}{CALL_END}'


def argument(key, text, kind="string"):
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}{ARGUMENT_END}'


def test_calls_with_thought_and_text_before():
    weather = call("get_weather", argument("city", "Zürich"), argument("days", "3", "number"))
    text = message("I look <|there|>.", weather, call("get_time"), thought="A <| b.")
    expected = (("get_weather", {"city": "Zürich", "days": 3}), ("get_time", {}))
    check(text, Output("I look <|there|>.", "A <| b.", expected), THINKING)
    check(THOUGHT_BEGIN + text, Output("I look <|there|>.", "A <| b.", expected))
    check(text.partition(RESPONSE_BEGIN)[2], Output("I look <|there|>.", "", expected))


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "", ""),
        ("string", " 3\n", " 3\n"),
        ("string", 'C:\\x "y" &amp; \t{z}', 'C:\\x "y" &amp; \t{z}'),
        ("string", f"{ARGUMENT_END} is how {CALL_END}s end", f"{ARGUMENT_END} is how {CALL_END}s end"),
        ("number", "-2.5e3", -2500.0),
        ("boolean", "false", False),
        ("null", "null", None),
        ("array", ' [1, ["a", {}]] ', [1, ["a", {}]]),
        ("object", '{"a": {"b": ["<|sep|>"]}}', {"a": {"b": ["<|sep|>"]}}),
        ("object", '{"a": ', '{"a": '),
    ],
)
def test_a_value(kind, text, value):
    check(message("", call("other", argument("x", text, kind))), Output(calls=(("other", {"x": value}),)))


def test_entities_in_a_key():
    text = message("", call("search", argument("say &quot;&amp;lt;&quot;", "x")))
    check(text, Output(calls=(("search", {'say "&lt;"': "x"}),)))


def test_a_value_without_a_type_follows_the_schema():
    text = message("", call("get_weather", f'<|open|>argument key="days"<|sep|>3{ARGUMENT_END}'))
    check(text, Output(calls=(("get_weather", {"days": 3}),)))


@pytest.mark.parametrize(
    "malformed",
    [
        "<|open|>call<|sep|><|close|>call<|sep|>",
        f'{CALL_BEGIN}index="1"<|sep|>{CALL_END}',
        f"{CALL_BEGIN}tool=get_time<|sep|>{CALL_END}",
        call("two words"),
        call("get_time", "text"),
        call("get_time", argument("a", "1"), argument("a", "2")),
        "text",
    ],
)
def test_a_malformed_call_is_content(malformed):
    tools = f"{TOOLS_BEGIN}{malformed}{TOOLS_END}"
    check(f"{RESPONSE_BEGIN}See{RESPONSE_END}{tools} there{MESSAGE_END}", Output(f"See{tools} there"))


def test_a_value_after_which_the_format_does_not_go_on_has_no_end():
    tools = f"{TOOLS_BEGIN}{call('get_time', argument('a', '1'), 'text')}{TOOLS_END}{MESSAGE_END}"
    check(f"See{tools}", Output(f"See{tools}"))


def test_a_response_or_tools_end_a_thought():
    check(f"Hm.{message('Yes.')}", Output("Yes.", "Hm."), THINKING)
    check(f"Hm.{TOOLS_BEGIN}{call('get_time')}{TOOLS_END}", Output("", "Hm.", (("get_time", {}),)), THINKING)


def test_a_call_that_the_model_left_is_content_and_one_that_was_cut_is_nothing():
    text = f"Hm.{TOOLS_BEGIN}{call('get_time').removesuffix(CALL_END)}"
    assert read(PLAIN, text) == Output(text)
    assert read(PLAIN, text, is_cut=True) == Output("Hm.")


def test_without_tools_calls_are_text():
    tools = f"{TOOLS_BEGIN}{call('get_time')}{TOOLS_END}"
    check(f"See{tools}{MESSAGE_END}", Output(f"See{tools}"), TOOLLESS)


def test_thoughts_that_are_not_told_from_content():
    spec = make_spec("kimi_k3", tools=(), starts_in_reasoning=True, has_reasoning=False)
    check(message("Yes.", thought="Hm."), Output(f"Hm.{THOUGHT_END}Yes."), spec)


def test_damaged_outputs():
    weather = call("get_weather", argument("city", "<|x"), argument("days", "3", "number"))
    check_damaged(
        (PLAIN, THINKING, TOOLLESS),
        [message("Text", weather, call("get_time"), thought="Hm."), message("Text", weather)],
        MARKERS,
    )


@pytest.mark.parametrize(
    "unit",
    ["x ", message("a", call("f", argument("a", "b"))), TOOLS_BEGIN, CALL_BEGIN, argument("a", ""), ARGUMENT_END],
)
def test_time_is_linear(unit, monkeypatch):
    check_linear(PLAIN, unit, monkeypatch)
    check_linear(PLAIN, TOOLS_BEGIN + unit, monkeypatch)
    check_linear(PLAIN, TOOLS_BEGIN + call("f").removesuffix(CALL_END) + unit, monkeypatch)
