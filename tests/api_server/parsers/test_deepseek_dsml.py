"""DeepSeek V3.2 and later: DSML, markup whose values are not escaped."""

import pytest
from parser_checks import Output, check_damaged, check_linear, check_output, output_of, read, specs_of

from octavo.api_server.parsers.deepseek_dsml import make_parser

VERSIONS = ["function_calls", "tool_calls", " calls"]
BEGINS = tuple(f"<｜DSML｜{version}>" for version in VERSIONS)
PLAIN, THINKING, TOOLLESS = specs_of("deepseek_dsml")
MARKERS = (*BEGINS, "<think>", "</think>", "<｜DSML｜invoke", "</｜DSML｜invoke>", "</｜DSML｜parameter>", '">')


def check(text, expected, spec=PLAIN):
    check_output(spec, text, expected, MARKERS)


def section(*calls, version="function_calls", layout="\n"):
    text = layout.join((f"<｜DSML｜{version}>", *calls, f"</｜DSML｜{version}>"))
    return text if version != " calls" else text.replace("｜invoke", "｜ invoke").replace("｜parameter", "｜ parameter")


def invoke(name, *parameters, layout="\n"):
    return layout.join((f'<｜DSML｜invoke name="{name}">', *parameters, "</｜DSML｜invoke>"))


def parameter(name, text, string="true"):
    return f'<｜DSML｜parameter name="{name}" string="{string}">{text}</｜DSML｜parameter>'


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("layout", ["", "\n", "\n\n  "])
def test_calls_with_thought_and_text_around(version, layout):
    weather = invoke("get_weather", parameter("city", "Zürich"), parameter("days", "3", "false"), layout=layout)
    calls = section(weather, invoke("get_time", layout=layout), version=version, layout=layout)
    expected = Output("I look.\n\n\nSo.", "A < b.", (("get_weather", {"city": "Zürich", "days": 3}), ("get_time", {})))
    check(f"A < b.</think>\n\nI look.\n\n{calls}\nSo.", expected, THINKING)


@pytest.mark.parametrize(
    ("text", "string", "value"),
    [
        ("  padded\n", "true", "  padded\n"),
        ("", "true", ""),
        ("007", "true", "007"),
        ('if a < b:\n\tprint("x\\n")', "true", 'if a < b:\n\tprint("x\\n")'),
        ('{"a": [1, {"b": null}], "c": "\\u00df"}', "false", {"a": [1, {"b": None}], "c": "ß"}),
        (" [1.5, -2e3]\n", "false", [1.5, -2000.0]),
        ("null", "false", None),
        ("<｜DSML｜tool_calls> holds <｜DSML｜invoke>", "true", "<｜DSML｜tool_calls> holds <｜DSML｜invoke>"),
        ("ends with </｜DSML｜parameter>, see", "true", "ends with </｜DSML｜parameter>, see"),
        ("</｜DSML｜invoke>", "true", "</｜DSML｜invoke>"),
    ],
)
def test_a_value(text, string, value):
    check(section(invoke("search", parameter("query", text, string))), Output(calls=(("search", {"query": value}),)))


def test_a_value_that_is_not_the_json_that_the_model_says_follows_the_schema():
    calls = section(invoke("get_weather", parameter("metric", "True", "false"), parameter("city", "Oslo", "false")))
    check(calls, Output(calls=(("get_weather", {"metric": True, "city": "Oslo"}),)))


def test_a_value_of_which_the_model_does_not_say_what_it_is_follows_the_schema():
    calls = section(invoke("get_weather", '<｜DSML｜parameter name="days">3</｜DSML｜parameter>'))
    check(calls, Output(calls=(("get_weather", {"days": 3}),)))


def test_a_call_that_closes_itself():
    check(section('<｜DSML｜invoke name="get_time"/>', invoke("get_time")), Output(calls=(("get_time", {}),) * 2))


@pytest.mark.parametrize(
    "call",
    [
        invoke("get weather"),
        invoke("get_weather", "Oslo"),
        invoke("get_weather", parameter("city", "Oslo"), parameter("city", "Rom")),
        invoke("get_weather", parameter("city", "Oslo"), "and more"),
        invoke("get_weather", "<｜DSML｜parameter city>Oslo</｜DSML｜parameter>"),
        invoke("get_weather", '<｜DSML｜parameter string="true">Oslo</｜DSML｜parameter>'),
        "<｜DSML｜invoke>\n</｜DSML｜invoke>",
        '<｜DSML｜invoke name="get_time" name="get_time">\n</｜DSML｜invoke>',
    ],
)
def test_a_malformed_call_is_content(call):
    text = f"See {section(call)} there"
    check(text, Output(text))


def test_a_good_call_after_a_malformed_one():
    bad, good = invoke("get_weather", "Oslo"), invoke("get_time")
    check(section(bad, good), Output(f"{BEGINS[0]}\n{bad}", "", (("get_time", {}),)))
    check(section(good, bad), Output(bad, "", (("get_time", {}),)))


def test_a_section_without_calls_is_content_at_once():
    text = f"{BEGINS[0]} begins calls, {BEGINS[1]} too, <｜DSML｜ or <｜DSML｜x> do not"
    check(text, Output(text))
    assert output_of(make_parser(PLAIN).push(text)).content == text


def test_a_call_that_the_model_left_is_content_and_one_that_was_cut_is_nothing():
    text = f"I look.\n\n{section(invoke('get_weather', parameter('city', 'Oslo')))}".partition("</｜DSML｜invoke>")[0]
    assert read(PLAIN, text) == Output(text)
    assert read(PLAIN, text, is_cut=True) == Output("I look.")


def test_without_tools_calls_are_text():
    text = section(invoke("get_time"))
    check(text, Output(text), TOOLLESS)


def test_damaged_outputs():
    weather = invoke("get_weather", parameter("city", "<｜DSML｜"), parameter("days", "3", "false"))
    texts = [section(weather, invoke("get_time"), version=version) for version in VERSIONS]
    check_damaged(
        (PLAIN, THINKING, TOOLLESS),
        [f"Hm.</think>{texts[0]} so", f"<think>Hm.</think>Text{texts[1]}", texts[2]],
        MARKERS,
    )


@pytest.mark.parametrize(
    "unit", ["x ", section(invoke("get_time")), BEGINS[0], invoke("f"), parameter("a", ""), parameter("a", "b") + "x"]
)
def test_time_is_linear(unit, monkeypatch):
    check_linear(PLAIN, unit, monkeypatch)
    check_linear(PLAIN, BEGINS[0] + unit, monkeypatch)
    check_linear(PLAIN, section(invoke("get_time")) + unit, monkeypatch)
