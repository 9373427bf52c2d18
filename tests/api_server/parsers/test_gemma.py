"""Gemma 4: an object notation of its own, thoughts in a channel."""

import pytest
from parser_checks import Output, check_damaged, check_linear, check_output, make_spec, output_of, read, specs_of

from octavo.api_server.parsers.gemma import CALL_BEGIN, CALL_END, QUOTE, THOUGHT_BEGIN, THOUGHT_END, make_parser

PLAIN, THINKING, TOOLLESS = specs_of("gemma")
MARKERS = (CALL_BEGIN, CALL_END, QUOTE, THOUGHT_BEGIN, THOUGHT_END, "call:")


def check(text, expected, spec=PLAIN):
    check_output(spec, text, expected, MARKERS)


def call(text):
    return f"{CALL_BEGIN}call:{text}{CALL_END}"


def quoted(text):
    return f"{QUOTE}{text}{QUOTE}"


def test_calls_with_thought_and_text_around():
    calls = call(f"get_weather{{city:{quoted('Zürich')},days:3}}") + "\n" + call("get_time{}")
    text = f"A <| b.\n{THOUGHT_END}I look. {calls} So."
    expected = Output("I look.  So.", "A <| b.", (("get_weather", {"city": "Zürich", "days": 3}), ("get_time", {})))
    check(text, expected, THINKING)
    check(f"{THOUGHT_BEGIN}\n{text}", expected)


def test_an_empty_thought_is_nothing():
    check(f"{THOUGHT_BEGIN}\n{THOUGHT_END}Yes.", Output("Yes."))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("{}", {}),
        ("{ }", {}),
        ("{a:true,b:false,c:null}", {"a": True, "b": False, "c": None}),
        ("{x:-3, y:2.5, z:[0,-0.5,1e+21,1e-05]}", {"x": -3, "y": 2.5, "z": [0, -0.5, 1e21, 1e-05]}),
        (f"{{Basic Chain:{{a b:[[{quoted('x,y')}],[]],c:{{}}}}}}", {"Basic Chain": {"a b": [["x,y"], []], "c": {}}}),
        (f"{{t:{quoted('}]{[:, ' + chr(10) + ' C:' + chr(92) + 'n')}}}", {"t": "}]{[:, \n C:\\n"}),
        (f"{{t:{quoted(call('f{}') + THOUGHT_END)}}}", {"t": call("f{}") + THOUGHT_END}),
        (f"{{t:{quoted('')}}}", {"t": ""}),
        (f'{{{quoted("a")}:"b, \\"c\\"","d":1}}', {"a": 'b, "c"', "d": 1}),
    ],
)
def test_arguments(text, arguments):
    check(call(f"search{text}"), Output(calls=(("search", arguments),)))


@pytest.mark.parametrize("name", ["get-weather", "weather.get", "wetter_für"])
def test_a_name(name):
    check(call(f"{name}{{}}"), Output(calls=((name, {}),)))


@pytest.mark.parametrize(
    "body",
    [
        "get_time no brace",
        "get_time",
        "{}",
        "two words{}",
        "get_time{} more",
        "get_time{}}",
        "get_time{a}",
        "get_time{a:}",
        "get_time{a:1,}",
        "get_time{a:1,a:2}",
        "get_time{a:NaN}",
        "get_time{a:Oslo}",
        "get_time{a:[1}]",
        "get_time{a:1 b:2}",
        "get_time[]",
        f"get_time{{a:{QUOTE}b",
    ],
)
def test_a_malformed_call_is_content(body):
    text = f"See {call(body)} there"
    check(text, Output(text))


def test_what_is_nested_too_deeply_is_content():
    text = call("f{a:" + "[" * 200)
    assert read(PLAIN, text) == Output(text)


def test_text_about_the_format_is_content_at_once():
    text = f"A call begins with {CALL_BEGIN} and ends, {THOUGHT_BEGIN[:-1]} is nothing"
    check(text, Output(text))
    assert output_of(make_parser(PLAIN).push(text)).content == text


def test_a_call_that_the_model_left_is_content_and_one_that_was_cut_is_nothing():
    text = f"I look. {call('get_time{}')}".removesuffix(CALL_END)
    assert read(PLAIN, text) == Output(text)
    assert read(PLAIN, text, is_cut=True) == Output("I look.")


def test_without_tools_calls_are_text():
    check(call("get_time{}"), Output(call("get_time{}")), TOOLLESS)


def test_thoughts_that_are_not_told_from_content():
    text = f"{THOUGHT_BEGIN}\nHm.{THOUGHT_END}Yes."
    check(text, Output(text), make_spec("gemma", tools=(), has_reasoning=False))


def test_damaged_outputs():
    calls = call(f"search{{query:{quoted('a<|b')},filters:{{a b:[1,{quoted('}')}],c:null}}}}") + call("get_time{}")
    check_damaged(
        (PLAIN, THINKING, TOOLLESS),
        [f"{THOUGHT_BEGIN}\nHm.{THOUGHT_END}Text {calls} end", f"Hm.{THOUGHT_END}{calls}"],
        MARKERS,
    )


@pytest.mark.parametrize("unit", ["x ", call("f{a:1}"), CALL_BEGIN, QUOTE, f"{CALL_BEGIN}call:f{{", "a:{", "[", "a:1,"])
def test_time_is_linear(unit, monkeypatch):
    check_linear(PLAIN, unit, monkeypatch)
    check_linear(PLAIN, f"{CALL_BEGIN}call:f{{{unit}", monkeypatch)
