"""Kimi K2: a section of special tokens, the tool's name in the id, arguments as JSON."""

import pytest
from parser_checks import Output, as_json, check_damaged, check_linear, check_output, read, specs_of

from octavo.api_server.parsers.kimi import (
    ARGUMENTS_BEGIN,
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    SECTION_END,
    name_in,
)

PLAIN, THINKING, TOOLLESS = specs_of("kimi")
MARKERS = (SECTION_BEGIN, SECTION_END, CALL_BEGIN, CALL_END, ARGUMENTS_BEGIN, "<think>", "</think>")


def check(text, expected, spec=PLAIN):
    check_output(spec, text, expected, MARKERS)


def section(*calls):
    return SECTION_BEGIN + "".join(calls) + SECTION_END


def call(call_id, arguments="{}"):
    return f"{CALL_BEGIN}{call_id}{ARGUMENTS_BEGIN}{arguments}{CALL_END}"


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functions.get_time:0", "get_time"),
        ("get_time:12", "get_time"),
        ("functions.get_time", "get_time"),
        ("functions.a.b:c:3", "a.b:c"),
        ("get_time:", "get_time:"),
        (":0", ""),
    ],
)
def test_the_name_in_an_id(call_id, name):
    assert name_in(call_id) == name


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"city": "Zürich 🌸", "days": 3, "x": None, "list": [1.5, [True]]},
        {"query": 'a "b" \\ \n', "filters": {"deep": {"x": {}}}},
        {"content": f"{CALL_END}{SECTION_END}</think>{CALL_BEGIN}f:0{ARGUMENTS_BEGIN}{{}}"},
    ],
)
@pytest.mark.parametrize("call_id", ["functions.search:0", " search:1 "])
def test_a_call(call_id, arguments):
    check(section(call(call_id, as_json(**arguments))), Output(calls=(("search", arguments),)))


def test_calls_with_thought_and_text_around():
    calls = section(call("functions.get_time:0"), "\n", call("functions.get_weather:1", ' {\n"days": 1\n} '))
    expected = Output("I look. So.", "A <| b.", (("get_time", {}), ("get_weather", {"days": 1})))
    check(f"A <| b.</think>I look.{calls} So.", expected, THINKING)


def test_a_section_ends_a_thought():
    text = f"I look.\n{section(call('get_time:0'))}So.</think>"
    check(text, Output("So.</think>", "I look.", (("get_time", {}),)), THINKING)


def test_text_in_a_section_that_belongs_to_no_call_is_dropped():
    text = f"Text. {SECTION_BEGIN} noise {call('get_time:0')} more {call('get_time:1')} noise {SECTION_END}"
    check(text, Output("Text.", "", (("get_time", {}),) * 2))


def test_an_empty_section_is_nothing():
    check(f"Well. {section(' ')}", Output("Well. "))


@pytest.mark.parametrize(
    "text",
    [
        section("nothing"),
        section(call("functions.get_weather:0", '{"days": 1')),
        section(call("functions.get_weather:0", '{"days": 1, "days": 2}')),
        section(call("functions.get_weather:0", '{"days": 01}')),
        section(call("functions.get_weather:0", "[]")),
        section(call("functions.get_weather:0", "{} {}")),
        section(call("two words:0")),
        section(call("functions.:0")),
        section(f"{CALL_BEGIN}functions.get_time:0{CALL_END}"),
    ],
)
def test_what_is_malformed_is_content(text):
    check(f"See {text} there", Output(f"See {text} there"))


def test_a_good_call_after_a_malformed_one():
    bad, good = call("get_weather:0", '{"days": '), call("get_time:1")
    check(section(bad, good), Output(SECTION_BEGIN + bad, "", (("get_time", {}),)))
    check(section(good, bad), Output(bad, "", (("get_time", {}),)))


def test_a_closing_marker_that_the_model_forgot():
    text = SECTION_BEGIN + call("get_weather:0", '{"days": 1}').removesuffix(CALL_END)
    assert read(PLAIN, text).calls == (("get_weather", {"days": 1}),)
    assert read(PLAIN, text + SECTION_END).calls == (("get_weather", {"days": 1}),)
    assert read(PLAIN, text, is_cut=True) == Output()


def test_without_tools_calls_are_text():
    text = section(call("functions.get_time:0"))
    check(text, Output(text), TOOLLESS)


def test_damaged_outputs():
    calls = section(call("functions.search:0", '{"query": "a\\"<|b"}'), call("functions.get_time:1", "{}"))
    check_damaged(
        (PLAIN, THINKING, TOOLLESS), [f"Hm.</think>Text {calls} end", f"<think>Hm.</think>{calls}\n", calls], MARKERS
    )


@pytest.mark.parametrize("unit", ["x ", call("get_time:0", '{"a": "b"}'), section(), SECTION_BEGIN, CALL_BEGIN, '{"'])
def test_time_is_linear(unit, monkeypatch):
    check_linear(PLAIN, unit, monkeypatch)
    check_linear(PLAIN, SECTION_BEGIN + unit, monkeypatch)
