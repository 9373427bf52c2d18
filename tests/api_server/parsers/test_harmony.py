"""Harmony, the format of gpt-oss: messages with channels and recipients."""

import pytest
from parser_checks import Output, as_json, check_damaged, check_linear, check_output, make_spec, read, specs_of

from octavo.api_server.parsers.harmony import THOUGHT_BEGIN, Header, read_header

CALL, END, RETURN = "<|call|>", "<|end|>", "<|return|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
PLAIN, THINKING, TOOLLESS = specs_of("harmony")
MARKERS = (f"{END}<|start|>", f"{CALL}<|start|>", RETURN, "<|channel|>", "<|message|>", " to=", "<|start|>")
HEADERS = [
    " to=functions.{}<|channel|>commentary <|constrain|>json",
    " to=functions.{}<|channel|>commentary<|constrain|>json",
    " to=functions.{}<|channel|>analysis json",
    "<|channel|>commentary to=functions.{} <|constrain|>json",
    "<|channel|>commentary to=functions.{}<|constrain|>json",
    "<|channel|>analysis to=functions.{}",
    "<|channel|>commentary to={}",
]


def check(text, expected, spec=PLAIN):
    check_output(spec, text, expected, MARKERS)


def call(name, arguments, header=HEADERS[0]):
    return f"{header.format(name)}<|message|>{arguments}"


@pytest.mark.parametrize(
    ("text", "header"),
    [
        ("", Header("", "")),
        ("assistant to=a<|channel|>b c", Header("b", "a")),
        ("<|channel|>b to=a <|constrain|>json", Header("b", "a")),
        ("assistant to=a<|channel|>b to=c", Header("b", "c")),
        ("<|channel|>a to=assistant<|channel|>b", Header("b", "")),
        ("assistant to=assistant<|channel|>b", Header("b", "")),
        ("<|channel|>to=a", Header("", "a")),
        ("assistant", Header("", "")),
    ],
)
def test_a_header(text, header):
    assert read_header(text) == header


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("end", ["", CALL, END])
def test_a_call(header, end):
    expected = (("get_weather", {"city": "Zürich", "days": 3}),)
    text = call("get_weather", ' {"city": "Zürich", "days": 3} ', header)
    check(f"{text}{end}", Output(calls=expected))
    check(f"{THOUGHT_BEGIN}Hm.{END}{NEXT}{text}{end}", Output("", "Hm.", expected))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"query": 'a "b" \\ \n \u0007', "filters": {"deep": {"x": [1.5, None, {}]}}},
        {"content": f"{CALL}{NEXT}{FINAL}{END} and {RETURN}"},
    ],
)
def test_arguments(arguments):
    check(call("search", as_json(**arguments)) + CALL, Output(calls=(("search", arguments),)))


def test_a_call_without_arguments():
    check(f"{call('get_time', '')}{CALL}{NEXT}{FINAL}So.", Output("So.", "", (("get_time", {}),)))


def test_messages_of_every_kind():
    weather = call("get_weather", '{"days": 1}')
    text = (
        f"{THOUGHT_BEGIN}A {CALL} or <|channel|>final b.\n{END}{NEXT}<|channel|>commentary<|message|>I look.{END}"
        f"{NEXT}{weather}{CALL}{NEXT}{call('get_time', '{}', HEADERS[3])}{END}"
        f"{NEXT}{THOUGHT_BEGIN}B.{END}{NEXT}{FINAL}It is {END}, they say.{RETURN}"
    )
    expected = Output(
        f"I look.\nIt is {END}, they say.",
        f"A {CALL} or <|channel|>final b.\n\nB.",
        (("get_weather", {"days": 1}), ("get_time", {})),
    )
    check(text, expected)


def test_an_output_that_begins_in_a_thought():
    check(f"Hm.{END}{NEXT}{FINAL}Yes.", Output("Yes.", "Hm."), THINKING)


@pytest.mark.parametrize("text", ["Yes, <|that|> is.", '{"name": "get_time"}', "\n Yes \n", "t", "<|chan"])
def test_an_output_that_begins_in_a_text(text):
    check(text, Output(text))
    check(f"{text}{END}{NEXT}{FINAL}More.", Output(f"{text}\nMore."))


def test_a_message_to_somebody_else_is_dropped():
    check(f"<|channel|>analysis to=python code<|message|>print(1){CALL}{NEXT}{FINAL}Yes.", Output("Yes."))


@pytest.mark.parametrize("body", ['{"days": 1', '{"days": 1, "days": 2}', "{} and more", "[]", "text"])
def test_a_malformed_call_is_content(body):
    text = call("get_weather", body)
    check(f"{THOUGHT_BEGIN}Hm.{END}{NEXT}{text}", Output(f"{NEXT}{text}", "Hm."))
    check(f"{THOUGHT_BEGIN}Hm.{END}{NEXT}{text}{CALL}", Output(f"{NEXT}{text}", "Hm."))


@pytest.mark.parametrize("header", ["<|channel|>??", "<|channel|>commentary?We need it.", "<|channel|>final {}"])
def test_a_header_without_a_message_is_content(header):
    assert read(PLAIN, header) == Output(header)
    assert read(PLAIN, header, is_cut=True) == Output()
    check(f"{header}{END}{NEXT}{THOUGHT_BEGIN}Hm.", Output(f"{header}{END}", "Hm."))
    check(f"{header}{NEXT}{THOUGHT_BEGIN}Hm.", Output(header, "Hm."))


def test_another_channel_is_content():
    check(f"<|channel|>comment<|message|>Yes.{END}", Output("Yes."))


def test_what_was_cut_in_a_call_is_nothing():
    text = call("get_time", '{"a": 1}')
    for length in range(len(" to="), len(text) + 1):
        assert read(PLAIN, text[:length], is_cut=True) == Output()
    assert read(PLAIN, text + CALL, is_cut=True).calls == (("get_time", {"a": 1}),)


def test_without_tools_calls_are_text():
    check(f"{call('get_time', '{}')}{CALL}", Output(call("get_time", "{}").lstrip()), TOOLLESS)


def test_thoughts_that_are_not_told_from_content():
    spec = make_spec("harmony", tools=(), has_reasoning=False)
    check(f"{THOUGHT_BEGIN}Hm.{END}{NEXT}{FINAL}Yes.", Output(f"{THOUGHT_BEGIN}Hm.\nYes."), spec)


def test_damaged_outputs():
    texts = [
        f"{THOUGHT_BEGIN}Hm.{END}{NEXT}{call('search', as_json(query='a<|b'))}{CALL}{NEXT}{FINAL}Yes.",
        f"{call('get_time', '{}', HEADERS[3])}{END}{NEXT}{FINAL}Yes.{RETURN}",
    ]
    check_damaged((PLAIN, THINKING, TOOLLESS), texts, (*MARKERS, CALL, END, "assistant", "<|constrain|>"))


@pytest.mark.parametrize(
    "unit",
    [
        "x ",
        f"{FINAL}a{END}{NEXT}",
        f"{call('f', '{}')}{CALL}<|start|>",
        "<|start|>",
        END,
        f"{END} ",
        "<|channel|>",
        '{"',
    ],
)
def test_time_is_linear(unit, monkeypatch):
    check_linear(PLAIN, unit, monkeypatch)
    check_linear(PLAIN, THOUGHT_BEGIN + unit, monkeypatch)
    check_linear(PLAIN, "<|channel|>" + unit, monkeypatch)
