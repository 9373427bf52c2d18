"""Outputs that end early, are malformed, or are anything at all: no call is reported that is not complete."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_checks import calls_of, content_of, make_spec, parse, parse_all_ways, reasoning_of, splits

from octavo.api_server.parsers.base import Content

OUTPUTS = {
    "hermes": '<think>Hm.</think>a\n<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "qwen_xml": "<think>Hm.</think>a\n<tool_call>\n<function=f>\n<parameter=a>\n</tool_call>\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    "llama_json": '{"name": "get_weather", "parameters": {"city": ";"}}; {"name": "get_time", "parameters": {}}',
    "pythonic": "[get_weather(city=']'), get_time()]",
    "mistral": '[THINK]Hm.[/THINK]a[TOOL_CALLS]f[ARGS]{"a": "[ARGS]"}'
    '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]',
}
FRAGMENTS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<function=", "f>", "</function>"),
    *("<parameter=", "a>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>"),
    *(
        '{"name": "get_time", "arguments": {}}',
        '{"name": "',
        "get_time",
        '", "parameters": {',
        "}}",
        "[",
        "]",
        "get_time(",
    ),
    *("(", ")", "{", "}", '"', "'", "\\", ",", ":", ";", "=", "1", "NaN", "a", " ", "\n", "é", "😀"),
]
MALFORMED = [
    ("hermes", "<tool_call>not valid json</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}} </tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_c'),
    ("qwen_xml", "<tool_call>nothing</tool_call>"),
    ("qwen_xml", "<function=f g>\n</function>"),
    ("qwen_xml", "<function=f>\n<parameter=a>\nb\n"),
    ("qwen_xml", "The <function=name> tag."),
    ("llama_json", '{"name": "get_time", "parameters": {}}; {"name": "f"}'),
    ("llama_json", '{"name": "get_time", "parameters": {"a'),
    ("pythonic", "[get_time(a=b)]"),
    ("pythonic", "[get_time(a='x"),
    ("mistral", "[TOOL_CALLS] not json at all"),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
    ("mistral", "[TOOL_CALLS] [1]"),
    ("mistral", "[TOOL_CALLS]f\tg[ARGS]{}"),
    ("mistral", "[TOOL_CALLS][ARGS]{}"),
]


BEGINNINGS = ("<think>", "[THINK]", "<tool_call>", "[TOOL_CALLS]", '{"name": "get_weather"', "[get_weather(")


def without_half_marker(text: str) -> str:
    """`text` without a marker, or the beginning of one, at its end."""
    halves = (each[:length] for each in BEGINNINGS for length in range(len(each), 0, -1))
    half = next((half for half in sorted(halves, key=len, reverse=True) if text.endswith(half)), "")
    return text.removesuffix(half).rstrip()


@pytest.mark.parametrize("family", OUTPUTS)
def test_a_cut_leaves_complete_calls_and_nothing_of_an_incomplete_one(family: str) -> None:
    text = OUTPUTS[family]
    whole = parse(make_spec(family), [text])
    calls = calls_of(whole)
    assert len(calls) == 2
    for length in range(len(text)):
        events = parse(make_spec(family), [text[:length]], is_cut=True)
        assert calls_of(events) == calls[: len(calls_of(events))]
        assert content_of(whole).startswith(without_half_marker(content_of(events))), text[:length]
        assert len(reasoning_of(events)) <= len("Hm.</think>")


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {}}'),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {}}</tool_c'),
        ("qwen_xml", "<function=f>\n<parameter=a>\nrm -rf /\n</function>"),
        ("qwen_xml", "<function=f>\n<parameter=a>\nrm -rf /\n</parameter>\n"),
        ("llama_json", '{"name": "get_time", "parameters": {}'),
        ("llama_json", '<|python_tag|>{"name": "f", "par'),
        ("pythonic", "[get_wea"),
        ("pythonic", "[get_time(), get_time("),
        ("mistral", "[TOOL_CALLS]get_time[ARGS]"),
        ("mistral", '[TOOL_CALLS]get_time[ARGS]{"a": 1'),
    ],
)
def test_a_call_that_may_go_on_behind_a_cut_is_nothing(family: str, text: str) -> None:
    assert parse_all_ways(make_spec(family), text, is_cut=True) == []


@pytest.mark.parametrize("family", OUTPUTS)
def test_a_cut_is_the_same_for_every_split(family: str) -> None:
    text = OUTPUTS[family]
    for length in range(0, len(text), 5):
        for is_cut in (True, False):
            parse_all_ways(make_spec(family), text[:length], is_cut)


@pytest.mark.parametrize("family", ["hermes", "qwen_xml", "mistral"])
def test_what_may_be_a_marker_is_text_when_nothing_follows(family: str) -> None:
    for text in ("a <", "a <to", "a <tool_call", "a [TOOL", "<thi", "<"):
        for is_cut in (True, False):
            assert parse(make_spec(family), [text], is_cut) == [Content(text)]


@pytest.mark.parametrize(("family", "text"), MALFORMED)
def test_what_is_malformed_is_content(family: str, text: str) -> None:
    assert parse_all_ways(make_spec(family), text) == [Content(text)]


def test_a_call_behind_a_malformed_one_is_a_call() -> None:
    good = '<tool_call>{"name": "f"}</tool_call>'
    events = parse_all_ways(make_spec("hermes"), f"<tool_call>no</tool_call>{good}")
    assert content_of(events) == "<tool_call>no</tool_call>"
    assert calls_of(events) == [("f", {})]
    assert calls_of(parse(make_spec("hermes"), [f"<tool_call>{good}"])) == [("f", {})]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*OUTPUTS, "think"]), st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.booleans(), st.data()
)
def test_anything_at_all(family: str, fragments: list[str], is_cut: bool, data: st.DataObject) -> None:
    spec = make_spec(family, starts_in_reasoning=data.draw(st.booleans()))
    text = "".join(fragments)
    events = parse(spec, [text], is_cut)
    calls_of(events)
    assert parse(spec, list(text), is_cut) == events
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(spec, pieces, is_cut) == events


HARD = {  # family -> beginning and what comes again and again
    "hermes": [
        ("<tool_call>", "["),
        ("<tool_call>", "<tool_call>"),
        ('<tool_call>"', "\\"),
        ("", "</tool_call"),
        ("", " "),
    ],
    "qwen_xml": [
        ("<function=f><parameter=a>\n", "</parameter>\n"),
        ("<function=f><parameter=a>\n", "\n<parameter="),
        ("", "<function=a>"),
        ("<tool_call>", " "),
    ],
    "llama_json": [("{", " "), ("", '{"name": "get_time"};'), ("<|python_tag|>", '{"name": {'), ('{"name": "', '\\"')],
    "pythonic": [("[get_time(", "["), ("[get_time(a='", "\\'"), ("[get_time(a='", "'"), ("[", " ")],
    "mistral": [
        ("[TOOL_CALLS]", "a"),
        ("", "[TOOL_CALLS]a[ARGS]"),
        ("[TOOL_CALLS][", '{"name":"f"},'),
        ("", "[THINK]"),
    ],
}


@pytest.mark.parametrize("family", HARD)
def test_time_is_linear(family: str) -> None:
    """Each takes a fraction of a second, and far more than allowed when text is looked at again and again."""
    for beginning, repeated in HARD[family]:
        text = beginning + repeated * (60_000 // len(repeated))
        started = time.process_time()
        parse(make_spec(family), [text])
        parse(make_spec(family), (text[start : start + 4] for start in range(0, len(text), 4)))
        assert time.process_time() - started < 5, (beginning, repeated)


def test_splits_are_all_of_them() -> None:
    assert list(splits("abc")) == [["a", "b", "c"], ["a", "bc"], ["ab", "c"]]
