"""GLM 4.5 and later: names, keys and values between tags, nothing escaped, types from the schema."""

import pytest
from parser_checks import Output, check_damaged, check_linear, check_output, output_of, parse, read, specs_of

from octavo.api_server.parsers.glm import CALL_BEGIN, CALL_END, KEY_BEGIN, KEY_END, VALUE_BEGIN, VALUE_END, make_parser

PLAIN, THINKING, TOOLLESS = specs_of("glm")
MARKERS = (CALL_BEGIN, CALL_END, KEY_BEGIN, KEY_END, VALUE_BEGIN, VALUE_END, "<think>", "</think>")
LAYOUTS = ["", "\n"]


def check(text, expected, spec=PLAIN):
    check_output(spec, text, expected, MARKERS)


def call(name, layout="", **texts):
    pairs = (f"{KEY_BEGIN}{key}{KEY_END}{layout}{VALUE_BEGIN}{text}{VALUE_END}{layout}" for key, text in texts.items())
    return f"{CALL_BEGIN}{name}{layout}{''.join(pairs)}{CALL_END}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_with_thought_and_text_around(layout):
    calls = call("get_weather", layout, city="Zürich", days="3", metric="true") + layout + call("get_time", layout)
    expected = (("get_weather", {"city": "Zürich", "days": 3, "metric": True}), ("get_time", {}))
    check(f"A < b.\n</think>\n\nI look.{calls} So.", Output("I look. So.", "A < b.", expected), THINKING)
    check(f"\n<think>A < b.</think>{calls}", Output("", "A < b.", expected))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("path", "3", "3"),
        ("path", '{"a": 1}', '{"a": 1}'),
        ("path", "  two  spaces\n", "  two  spaces\n"),
        ("path", 'C:\\x "y" \t{z}', 'C:\\x "y" \t{z}'),
        ("path", f"{CALL_BEGIN} and {CALL_END} and {KEY_BEGIN}", f"{CALL_BEGIN} and {CALL_END} and {KEY_BEGIN}"),
        ("path", f"values end with {VALUE_END} they say", f"values end with {VALUE_END} they say"),
        ("path", "", ""),
        ("unknown", "3", "3"),
    ],
)
def test_a_string(layout, key, text, value):
    check(call("write_file", layout, **{key: text}), Output(calls=(("write_file", {key: value}),)))


def test_nested_values():
    text = '{"theme": {"accent": [255, {"x": null}]}, "on": true}'
    value = {"theme": {"accent": [255, {"x": None}]}, "on": True}
    check(call("search", query="ß ☕", filters=text), Output(calls=(("search", {"query": "ß ☕", "filters": value}),)))


def test_a_tool_that_is_not_offered_has_strings():
    check(call("other", days="3"), Output(calls=(("other", {"days": "3"}),)))


@pytest.mark.parametrize(
    "text",
    [
        f"{CALL_BEGIN}{CALL_END}",
        f"{CALL_BEGIN}two words{CALL_END}",
        f'{CALL_BEGIN}{{"name": "get_time"}}{CALL_END}',
        f"{CALL_BEGIN}get_time{KEY_BEGIN}city{KEY_END}Oslo{CALL_END}",
        f"{CALL_BEGIN}get_time{KEY_BEGIN}{KEY_END}{VALUE_BEGIN}Oslo{VALUE_END}{CALL_END}",
        f"{CALL_BEGIN}get_time {VALUE_BEGIN}Oslo{VALUE_END}{CALL_END}",
        call("get_weather", city="Oslo").removesuffix(CALL_END) + call("", city="Rom").removeprefix(CALL_BEGIN),
    ],
)
def test_a_malformed_call_is_content(text):
    check(f"See {text} there", Output(f"See {text} there"))


def test_text_about_the_format_is_content_at_once():
    text = f"A call begins with {CALL_BEGIN} and ends"
    check(text, Output(text))
    assert output_of(make_parser(PLAIN).push(text)).content == text


def test_a_good_call_in_a_malformed_one():
    check(f"{CALL_BEGIN}go {call('get_time')}", Output(f"{CALL_BEGIN}go", "", (("get_time", {}),)))


def test_a_value_that_the_model_did_not_close():
    last = call("get_weather", days="3").replace(VALUE_END, "")
    text = call("write_file", path="a") + last * 2 + " So."
    calls = (("write_file", {"path": "a"}), ("get_weather", {"days": 3}), ("get_weather", {"days": 3}))
    assert read(PLAIN, text) == Output("So.", "", calls)
    assert output_of(parse(PLAIN, list(text))) == Output("So.", "", calls)
    assert read(PLAIN, text, is_cut=True).calls == calls[:1]


def test_a_call_that_the_model_left_is_content_and_one_that_was_cut_is_nothing():
    text = f"I look. {call('get_weather', city='Oslo')}".removesuffix(CALL_END)
    assert read(PLAIN, text) == Output(text)
    assert read(PLAIN, text, is_cut=True) == Output("I look.")


def test_without_tools_calls_are_text():
    check(call("get_time"), Output(call("get_time")), TOOLLESS)


def test_damaged_outputs():
    texts = [
        "Hm.</think>\n" + call("get_weather", "\n", city="a < b", days="3") + "\n" + call("get_time") + "\nend",
        "<think>Hm.</think>Text"
        + call("write_file", content=f"{CALL_BEGIN}x{CALL_END}")
        + call("get_weather", days="x"),
    ]
    check_damaged((PLAIN, THINKING, TOOLLESS), texts, MARKERS)


@pytest.mark.parametrize(
    "unit",
    [
        "x ",
        call("get_time"),
        call("write_file", path="x"),
        call("write_file", path="x").replace(VALUE_END, ""),
        CALL_BEGIN,
        f"{CALL_BEGIN}f{KEY_BEGIN}",
        f"{CALL_BEGIN}f{KEY_BEGIN}k{KEY_END}{VALUE_BEGIN}",
        f"{VALUE_END} ",
    ],
)
def test_time_is_linear(unit, monkeypatch):
    check_linear(PLAIN, unit, monkeypatch)
    check_linear(PLAIN, f"{CALL_BEGIN}f{KEY_BEGIN}k{KEY_END}{VALUE_BEGIN}{unit}", monkeypatch)
