"""The end of JSON in text that goes on, against Python's own decoder; and what strict means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.api_server.parsers.json_scan import (
    MAX_DEPTH,
    JsonScanner,
    arguments_text,
    decode_strict,
    encode,
    is_tool_name,
    raw_members,
    read_call,
)

texts = st.text(alphabet='a"\\{}[],: \n\tébn😀</', max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
structures = st.lists(values, max_size=3) | st.dictionaries(texts, values, max_size=3)
NOT_JSON = [
    '{"a": NaN}',
    "[Infinity]",
    "[-Infinity]",
    "[1e999]",
    '{"a": 1, "a": 2}',
    '["a\nb"]',
    "[01]",
    "[1,]",
    "",
    "{'a': 1}",
]


def scan(pieces: list[str]) -> tuple[JsonScanner, int]:
    """Push pieces until the value ends; return the scanner and how many characters belong to the value."""
    scanner, num_chars = JsonScanner(), 0
    for piece in pieces:
        num_taken = scanner.push(piece)
        num_chars += num_taken
        if num_taken < len(piece):
            break
    return scanner, num_chars


@given(structures, st.sampled_from(["", "x", "}", "]", '"', ",", " 1", "</tool_call>"]), st.booleans(), st.data())
def test_the_end_of_a_structure(value: Any, rest: str, is_ascii: bool, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=data.draw(st.sampled_from([None, 1])))
    cut = data.draw(st.integers(0, len(text)))
    for pieces in ([text + rest], [*text, rest], [text[:cut], text[cut:] + rest]):
        scanner, num_chars = scan(pieces)
        assert (scanner.is_complete, num_chars, scanner.text) == (True, len(text), text)


@given(texts, structures)
def test_every_beginning_is_incomplete(blanks: str, value: Any) -> None:
    text = json.dumps(value)
    for length in range(len(text)):
        scanner, num_chars = scan([text[:length]])
        assert (scanner.is_complete, scanner.is_malformed, num_chars) == (False, False, length)


NOT_FROM = [  # a text, and how much of it may be JSON
    *(('{"a":]', 5), ('{"a" 1', 5), ("{,", 1), ('{"a":1,}', 7), ("[1,]", 3), ("{1:2}", 1), ("[1 2]", 3), ("}", 0)),
    *(("{'a'", 1), ("<", 0), ('{"a": <', 6), ("[" * MAX_DEPTH + "[", MAX_DEPTH)),
]


@pytest.mark.parametrize(("text", "num_chars"), NOT_FROM)
def test_what_cannot_be_json_ends_at_the_first_such_character(text: str, num_chars: int) -> None:
    for pieces in ([text], list(text)):
        scanner, num_taken = scan(pieces)
        assert (scanner.is_malformed, scanner.is_complete, num_taken) == (True, False, num_chars)


@pytest.mark.parametrize("text", ["12", "-1.5e3", "true", '"a\\"b"'])
def test_scalars(text: str) -> None:
    scanner, num_chars = scan([*f" {text}", " ,"])
    assert (scanner.is_complete, num_chars) == (True, 1 + len(text))
    scanner, _ = scan([text])
    scanner.finish()
    assert scanner.is_complete


def test_a_string_is_known_as_one() -> None:
    scanner, _ = scan(['{"a": "b\\'])
    assert scanner.is_in_string
    scanner.push('"')
    assert scanner.is_in_string
    scanner.push('"')
    assert not scanner.is_in_string


@pytest.mark.parametrize("text", [*NOT_JSON, "[" * 100_000, '{"a":' * 100_000])
def test_decode_strict_refuses(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the decoder's texts are its own
        decode_strict(text)
    assert raw_members(text) is None


@given(values)
def test_encode_and_decode(value: Any) -> None:
    assert decode_strict(encode(value)) == value


def test_half_a_surrogate_pair_stays_an_escape() -> None:
    assert encode(["é", "\ud83d"]) == '["\\u00e9", "\\ud83d"]'
    assert raw_members('{"a": "\\ud83d"}') == {"a": '"\\ud83d"'}
    assert encode(["é"]) == '["é"]'


def test_members_are_as_they_were_written() -> None:
    assert raw_members(' { "b" : 1.50,"a":{ "c": [ ] } } ') == {"b": "1.50", "a": '{ "c": [ ] }'}
    assert raw_members("[1]") is None


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", "{}"),
        (" \n", "{}"),
        (' {"a": 1} ', '{"a": 1}'),
        ("[]", None),
        ('{"a": NaN}', None),
        ('{"a": 1', None),
        ('""', None),
    ],
)
def test_arguments(text: str, arguments: str | None) -> None:
    assert arguments_text(text) == arguments


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('{"name": "f", "arguments": {"a": 1.0}}', ("f", '{"a": 1.0}')),
        ('{"parameters": {}, "type": "function", "name": "f"}', ("f", "{}")),
        ('{"name": "f"}', ("f", "{}")),
        ('{"name": "f", "arguments": null}', ("f", "{}")),
        ('{"name": "f", "arguments": ""}', ("f", "{}")),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ("f", '{"a": 1}')),
        ('{"name": "f", "arguments": "a"}', None),
        ('{"name": "f", "arguments": [1]}', None),
        ('{"name": "f", "arguments": {}, "parameters": {}}', None),
        ('{"name": 1, "arguments": {}}', None),
        ('{"name": "a b", "arguments": {}}', None),
        ('{"name": "\\ud83d", "arguments": {}}', None),
        ('{"arguments": {}}', None),
        ("[]", None),
    ],
)
def test_calls(text: str, call: tuple[str, str] | None) -> None:
    assert read_call(text) == call


def test_tool_names() -> None:
    assert all(map(is_tool_name, ("f", "get-time_2", "a.b:c", "天気", "x" * 128)))
    assert not any(map(is_tool_name, ("", "a b", "a\n", "\t", "x" * 129, None, 1)))
