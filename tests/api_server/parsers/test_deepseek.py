"""DeepSeek V3, R1 and V3.1: a section of special tokens, arguments as JSON."""

import pytest
from parser_checks import Output, as_json, check_damaged, check_linear, check_output, output_of, read, specs_of

from octavo.api_server.parsers.deepseek import CALL_BEGIN, CALL_END, SECTION_BEGIN, SECTION_END, SEPARATOR, make_parser

PLAIN, THINKING, TOOLLESS = specs_of("deepseek")
MARKERS = (SECTION_BEGIN, SECTION_END, CALL_BEGIN, CALL_END, SEPARATOR, "```", "<think>", "</think>", "function")


def check(text, expected, spec=PLAIN):
    check_output(spec, text, expected, MARKERS)


def section(*calls: str) -> str:
    return SECTION_BEGIN + "".join(calls) + SECTION_END


def v3(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL_BEGIN}{name}{SEPARATOR}{arguments}{CALL_END}"


NESTED = {"query": 'a "b" \\ \n c', "filters": {"tags": [1, [2.5, None]], "deep": {"x": {"y": {}}}, "ß": "🌸"}}
SPEAKING = {"path": "a.md", "content": f"End with {CALL_END}{SECTION_END} or ``` or {CALL_BEGIN}f{SEPARATOR}{{}}"}


@pytest.mark.parametrize("call", [v3, v31])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("get_weather", {"city": "Oslo", "days": 3}), ("search", NESTED), ("write_file", SPEAKING), ("get_time", {})],
)
def test_a_call(call, name, arguments):
    check(section(call(name, as_json(**arguments))), Output(calls=((name, arguments),)))


@pytest.mark.parametrize("call", [v3, v31])
@pytest.mark.parametrize("between", ["", "\n", " \n\n"])
def test_calls_with_thought_and_text_around(call, between):
    calls = between.join((call("get_time", "{}"), call("get_weather", '{"city": "Rom"}'), call("get_time", "{}")))
    text = f"Two <｜of｜> them.</think>\n\nI look.\n\n{section(calls)}\nSo."
    expected = Output(
        "I look.\n\n\nSo.", "Two <｜of｜> them.", (("get_time", {}), ("get_weather", {"city": "Rom"}), ("get_time", {}))
    )
    check(text, expected, THINKING)


def test_a_thought_that_the_output_opens():
    check("\n<think>\nWell.\n</think>\n\nYes.", Output("Yes.", "Well."))


def test_text_that_only_looks_like_markup():
    text = " <think is no marker, <｜tool▁calls▁beg neither, </think> is none here. \n"
    check(text, Output(text))


@pytest.mark.parametrize(
    "body",
    [
        '{"city": "Oslo"',
        '{"city": "Oslo", "city": "Rom"}',
        '{"days": NaN}',
        '["Oslo"]',
        '"Oslo"',
        '{"city": "Oslo"} or so',
        "{city: 1}",
    ],
)
@pytest.mark.parametrize("call", [v3, v31])
def test_a_malformed_call_is_content(call, body):
    text = f"See {section(call('get_weather', body))} there"
    check(text, Output(text))


def test_a_good_call_after_a_malformed_one():
    bad, good = v31("get_weather", '{"city": '), v31("get_time", "{}")
    check(section(bad, good), Output(SECTION_BEGIN + bad, "", (("get_time", {}),)))
    check(section(good, bad), Output(bad, "", (("get_time", {}),)))


@pytest.mark.parametrize(
    "text", [f"{SECTION_BEGIN} is how calls begin", f"{SECTION_BEGIN}function{SEPARATOR}x{SECTION_END}"]
)
def test_a_section_without_calls_is_content_at_once(text):
    check(text, Output(text))
    parser = make_parser(PLAIN)
    assert output_of(parser.push(text)).content == text


def test_an_empty_section_is_nothing():
    check(f"Well. {section(' ')}", Output("Well. "))


@pytest.mark.parametrize("call", [v3, v31])
def test_a_closing_marker_that_the_model_forgot(call):
    text = SECTION_BEGIN + call("get_weather", '{"days": 1}').removesuffix(CALL_END)
    expected = Output(calls=(("get_weather", {"days": 1}),))
    assert read(PLAIN, text) == expected
    assert read(PLAIN, text, is_cut=True) == Output()
    assert read(PLAIN, text + call("get_time", "{}")).calls == (
        *expected.calls,
        ("get_time", {}),
    )


def test_a_call_that_the_model_left_is_content_and_one_that_was_cut_is_nothing():
    text = f"I look. {SECTION_BEGIN}{CALL_BEGIN}get_weather{SEPARATOR}{{"
    assert read(PLAIN, text) == Output(text)
    assert read(PLAIN, text, is_cut=True) == Output("I look.")


def test_without_tools_calls_are_text():
    text = section(v31("get_time", "{}"))
    check(text, Output(text), TOOLLESS)


def test_damaged_outputs():
    texts = [
        "Hm.</think>Text " + section(v3("get_weather", '{"city": "a\\"b", "days": 1}'), v3("get_time", "{}")) + " end",
        "<think>Hm.</think>" + section(v31("get_weather", '{"city": "}", "days": 1}'), v31("get_time", "")) + "\n",
    ]
    check_damaged((PLAIN, THINKING, TOOLLESS), texts, MARKERS)


@pytest.mark.parametrize(
    "unit",
    [
        "x ",
        v31("get_time", '{"a": [1]}'),
        section(v3("get_time", "{}")),
        SECTION_BEGIN,
        SECTION_BEGIN + CALL_BEGIN,
        "<think>",
    ],
)
def test_time_is_linear(unit, monkeypatch):
    check_linear(PLAIN, unit, monkeypatch)
    check_linear(PLAIN, SECTION_BEGIN + unit, monkeypatch)
