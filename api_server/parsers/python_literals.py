"""Python's notation for values and calls, as far as JSON can say the same: read, never evaluated.

Constants, strings, numbers, lists, tuples and dicts with string keys. JSON's `true`, `false` and `null` are taken too,
because models mix them in. Rejected: `ast`, which crashes on deep nesting and takes far more than values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from octavo.api_server.parsers.json_scan import BLANKS, MAX_DEPTH

T = TypeVar("T")

WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}
HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
NUMBER_CHARACTERS = frozenset("0123456789.eE+-_")
NAME_MARKS = "_-."


def read_literal(text: str) -> Any:
    """Return the value that the whole text is. ValueError: it is none."""
    reader = _Reader(text)
    value = reader.value()
    reader.end()
    return value


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return names and arguments of `[name(key=value, ...), ...]`, the whole text. ValueError: it is something else."""
    reader = _Reader(text)
    reader.take("[")
    calls = reader.sequence("]", reader.call)
    reader.end()
    return calls


class _Reader:
    """A position in a text. Every method passes white space first and raises ValueError where the text is wrong."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._depth = 0

    def value(self) -> Any:
        character = self.peek()
        if character in ("'", '"'):
            return self.string()
        if character in ("{", "[", "("):
            return self._nested(character)
        if character.isalpha():
            word = self.name()
            if word not in WORDS:
                raise ValueError("a word that is no constant")
            return WORDS[word]
        return self._number()

    def call(self) -> tuple[str, dict[str, Any]]:
        name = self.name()
        self.take("(")
        return name, self._unique(self.sequence(")", lambda: self._member(self.name, "=")))

    def sequence(self, closer: str, read: Callable[[], T]) -> list[T]:
        """Read items between commas up to `closer`, which is passed; a comma may stand behind the last."""
        items: list[T] = []
        while self.peek() != closer:
            items.append(read())
            if self.peek() != closer:
                self.take(",")
        self.take(closer)
        return items

    def peek(self) -> str:
        """Return the next character, "" at the end."""
        while self._position < len(self._text) and self._text[self._position] in BLANKS:
            self._position += 1
        return self._text[self._position : self._position + 1]

    def take(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(f"there is no {character}")
        self._position += 1

    def end(self) -> None:
        if self.peek():
            raise ValueError("more text follows")

    def name(self) -> str:
        self.peek()
        name = self._run(lambda character: character.isalnum() or character in NAME_MARKS)
        if not name:
            raise ValueError("there is no name")
        return name

    def string(self) -> str:
        quote = self.peek()
        if quote not in ("'", '"'):
            raise ValueError("there is no string")
        self._position += 1
        pieces = []
        while True:
            pieces.append(self._run(lambda character: character not in (quote, "\\")))
            character = self._next()
            if character == quote:
                break
            pieces.append(self._escape())
        # The halves of a surrogate pair are one character; a single half raises a ValueError.
        return "".join(pieces).encode("utf-16", "surrogatepass").decode("utf-16")

    def _nested(self, opener: str) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError("the nesting is too deep")
        self.take(opener)
        value: Any
        if opener == "{":
            value = self._unique(self.sequence("}", lambda: self._member(self.string, ":")))
        else:
            value = self.sequence("]" if opener == "[" else ")", self.value)
        self._depth -= 1
        return value

    def _member(self, read_key: Callable[[], str], separator: str) -> tuple[str, Any]:
        key = read_key()
        self.take(separator)
        return key, self.value()

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            raise ValueError("a key stands twice")
        return members

    def _number(self) -> int | float:
        text = self._run(NUMBER_CHARACTERS.__contains__)
        try:
            return int(text)
        except ValueError:
            value = float(text)
        if not math.isfinite(value):
            raise ValueError("the number is too large")
        return value

    def _escape(self) -> str:
        """Read what follows a backslash. One that means nothing stands for itself."""
        character = self._next()
        if character not in HEX_ESCAPES:
            return ESCAPES.get(character, "\\" + character)
        digits = self._text[self._position : self._position + HEX_ESCAPES[character]]
        if len(digits) < HEX_ESCAPES[character] or not digits.isalnum():
            raise ValueError("a character's number is cut short")
        self._position += len(digits)
        code = int(digits, 16)
        if code > sys.maxunicode:
            raise ValueError("there is no such character")
        return chr(code)

    def _run(self, belongs: Callable[[str], bool]) -> str:
        """Pass characters as long as they belong; return them."""
        start = self._position
        while self._position < len(self._text) and belongs(self._text[self._position]):
            self._position += 1
        return self._text[start : self._position]

    def _next(self) -> str:
        if self._position == len(self._text):
            raise ValueError("the text ends")
        self._position += 1
        return self._text[self._position - 1]
