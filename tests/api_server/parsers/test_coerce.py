"""Arguments without types, to the types of a schema; and values in Python's notation."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.api_server.parsers.coerce import arguments_of, coerce
from octavo.api_server.parsers.python_literals import read_calls, read_literal

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
BOOLEAN, OBJECT, ARRAY, NULL = {"type": "boolean"}, {"type": "object"}, {"type": "array"}, {"type": "null"}

CASES = [
    *((STRING, text, text) for text in ("3", "true", "null", '{"a": 1}', " a\n", "", 'é "x" \\')),
    *((None, text, text) for text in ("3", "null", "[1]")),
    *((INTEGER, text, value) for text, value in (("3", 3), (" -3\n", -3), ("0", 0), ("3.0", 3.0), ("1e2", 100.0))),
    *((INTEGER, text, text) for text in ("3.5", "03", "123_456", "abc", "", "NaN", "1e999", "true")),
    *((NUMBER, text, value) for text, value in (("3", 3), ("-2.5", -2.5), ("1e20", 1e20))),
    *((BOOLEAN, text, value) for text, value in (("true", True), ("False", False), ("yes", "yes"), ("1", "1"))),
    *(
        (OBJECT, text, value)
        for text, value in (('{"a": [1]}', {"a": [1]}), ("{'a': True}", {"a": True}), ("[1]", "[1]"))
    ),
    *(
        (ARRAY, text, value)
        for text, value in (("[1, 2]", [1, 2]), ("['a', None]", ["a", None]), ("[1", "[1"), ("{}", "{}"))
    ),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": ["string", "null"]}, "nothing", "nothing"),
    ({"type": ["integer", "string"]}, "5", 5),
    ({"type": ["integer", "string"]}, "02139", "02139"),
    ({"anyOf": [INTEGER, NULL]}, "5", 5),
    ({"oneOf": [{"allOf": [OBJECT]}, STRING]}, '{"a": 1}', {"a": 1}),
    ({"$ref": "#/$defs/Count"}, "5", 5),
    ({"$ref": "#/$defs/Nowhere"}, "5", "5"),
    ({"$ref": "http://example.com"}, "5", "5"),
    ({"$ref": "#/$defs/Loop"}, "5", "5"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, None]}, "1", 1),
    ({"const": 2.5}, "2.5", 2.5),
    ({"type": "integer", "nullable": True}, "null", None),
    ({"properties": {"a": {}}}, "{}", {}),
    ({"items": STRING}, "[]", []),
    ({}, '{"a": 1}', {"a": 1}),
    ({}, "5", "5"),
    (True, "5", "5"),
    ({"type": 5, "anyOf": 6, "enum": 7}, "5", "5"),
]
ROOT = {"$defs": {"Count": {"anyOf": [{"$ref": "#/$defs/Whole"}]}, "Whole": INTEGER, "Loop": {"$ref": "#/$defs/Loop"}}}


@pytest.mark.parametrize(("schema", "text", "value"), CASES)
def test_a_text_becomes_what_the_schema_says(schema: Any, text: str, value: Any) -> None:
    decoded = json.loads(coerce(text, schema, ROOT))
    assert decoded == value
    assert type(decoded) is type(value)


def test_numbers_keep_their_digits() -> None:
    assert coerce("12345678901234567890.10", NUMBER) == "12345678901234567890.10"


def test_arguments_keep_their_order() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER, "b": STRING}}
    assert arguments_of({"b": "1", "a": "1", 'c"': "1"}, schema) == '{"b": "1", "a": 1, "c\\"": "1"}'
    assert arguments_of({"a": "1"}, None) == '{"a": "1"}'
    assert arguments_of({"a": "1"}, {"properties": 3}) == '{"a": "1"}'
    assert arguments_of({}, schema) == "{}"


def refuses(read: Callable[[str], Any], text: str) -> bool:
    """Whether `read` raises the error that it is to raise."""
    try:
        read(text)
    except ValueError:
        return True
    return False


literals = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(literals)
def test_literals_are_read_as_python_reads_them(value: Any) -> None:
    assert read_literal(repr(value)) == value
    assert read_literal(f" {json.dumps(value)} ") == value


@given(st.text(alphabet="[](){}'\"\\,:=-+.eE0123456789_abTrueNon xu \n", max_size=20))
def test_whatever_is_read_is_what_python_reads(text: str) -> None:
    try:
        value = read_literal(text)
    except ValueError:
        return
    try:
        expected = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return  # more is read than Python knows: line breaks in strings, leading zeros
    assert json.dumps(value) == json.dumps(expected)


NO_LITERALS = [
    *(
        "",
        "a",
        "f()",
        "{1, 2}",
        "{1: 2}",
        "{'a': 1, 'a': 2}",
        "[1 2]",
        "[,]",
        "'a",
        "'\\u12'",
        "'\\ud83d'",
        "'\\Uffffffff'",
    ),
    *("-", "1e999", "[1]]", "1 + 1", "nan", "[" * 1000, "'a' 'b'", "b'a'", "..."),
]


@pytest.mark.parametrize("text", NO_LITERALS)
def test_what_is_no_literal(text: str) -> None:
    assert refuses(read_literal, text)


def test_escapes() -> None:
    assert read_literal(r"'\'\"\\\n\t\x41\u00e9\U0001f600\d'") == "'\"\\\n\tAé😀\\d"
    assert read_literal(r"'\ud83d\ude00'") == "😀"


def test_calls() -> None:
    assert read_calls("[f(a=1, b=[{'c': None}],), g.h-i() , ]") == [("f", {"a": 1, "b": [{"c": None}]}), ("g.h-i", {})]
    assert read_calls("[]") == []
    for text in ("f()", "[f]", "[f(1)]", "[f(a=1, a=2)]", "[f(a=b)]", "[f(a=1) g()]", "[f()] x", "[(a=1)]", "[f(", "["):
        assert refuses(read_calls, text), text
