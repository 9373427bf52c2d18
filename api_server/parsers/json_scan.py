"""JSON inside model output: where a value ends while its text still comes, and whether it is strict JSON.

`JsonScanner` finds the end of one value, so that a marker inside a string is text and not a marker. It knows JSON's
structure and gives up at the first character that cannot be, which keeps a broken body from swallowing what follows;
what is inside strings, numbers and words is judged by `decode_strict` once the value is complete.

Strict means RFC 8259: no NaN or Infinity, no number that a double cannot hold, no key twice, no control characters in
strings, and at most `MAX_DEPTH` levels.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import msgspec

MAX_DEPTH = 128
MAX_NAME_CHARACTERS = 128
BLANKS = frozenset(" \t\r\n")
ATOM_CHARACTERS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
CLOSERS = {"{": "}", "[": "]"}

_VALUE, _VALUE_OR_CLOSE, _KEY, _KEY_OR_CLOSE, _COLON, _COMMA_OR_CLOSE, _DONE = range(7)


class JsonScanner:
    """The end of one JSON value in text that comes in pieces; white space before it belongs to it.

    Attributes:
        is_complete: the value has ended. A number or word at the top ends with the character after it, or `finish`.
        is_malformed: the character after those that `push` counted cannot be there.
        is_in_string: more text now would be inside a string.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.is_malformed = False
        self.is_in_string = False
        self._pieces: list[str] = []
        self._open: list[str] = []
        self._expected = _VALUE
        self._is_escaped = False
        self._is_in_atom = False

    @property
    def text(self) -> str:
        """All text that belongs to the value so far."""
        return "".join(self._pieces)

    def push(self, text: str) -> int:
        """Take more text; return how many of its characters belong to the value.

        Fewer than all only if the value is complete or malformed; what follows was not looked at. Nothing more is
        taken after that.
        """
        position = 0
        while position < len(text) and not self.is_complete and not self.is_malformed:
            if self.is_in_string:
                position = self._pass_string(text, position)
            elif self._is_in_atom:
                position = self._pass_atom(text, position)
            elif text[position] in BLANKS or self._step(text[position]):
                position += 1
        self._pieces.append(text[:position])
        return position

    def finish(self) -> None:
        """No more text comes: a number or word at the top is complete."""
        if self._is_in_atom and not self._open:
            self.is_complete = True

    def _pass_string(self, text: str, position: int) -> int:
        """Return the position after the string, or the end of the text if it goes on."""
        quote = -1
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            if quote < position:
                quote = text.find('"', position) % (len(text) + 1)
            backslash = text.find("\\", position, quote)
            if backslash < 0:
                break
            self._is_escaped = True
            position = backslash + 1
        else:
            return position
        if quote < len(text):
            self.is_in_string = False
            self._end_value()
        return min(quote + 1, len(text))

    def _pass_atom(self, text: str, position: int) -> int:
        while position < len(text) and text[position] in ATOM_CHARACTERS:
            position += 1
        if position < len(text):
            self._is_in_atom = False
            self._end_value()
        return position

    def _step(self, character: str) -> bool:
        """Take a character of structure; return whether it belongs to the value."""
        expected = self._expected
        if character == '"' and expected <= _KEY_OR_CLOSE:
            self.is_in_string = True
        elif character in CLOSERS and expected <= _VALUE_OR_CLOSE and len(self._open) < MAX_DEPTH:
            self._open.append(CLOSERS[character])
            self._expected = _KEY_OR_CLOSE if character == "{" else _VALUE_OR_CLOSE
        elif (
            self._open and character == self._open[-1] and expected in (_VALUE_OR_CLOSE, _KEY_OR_CLOSE, _COMMA_OR_CLOSE)
        ):
            self._open.pop()
            self._expected = _VALUE
            self._end_value()
        elif character == "," and expected == _COMMA_OR_CLOSE:
            self._expected = _KEY if self._open[-1] == "}" else _VALUE
        elif character == ":" and expected == _COLON:
            self._expected = _VALUE
        elif character in ATOM_CHARACTERS and expected <= _VALUE_OR_CLOSE:
            self._is_in_atom = True
        else:
            self.is_malformed = True
        return not self.is_malformed

    def _end_value(self) -> None:
        """A value or a key has ended."""
        if self._expected in (_KEY, _KEY_OR_CLOSE) and self._open:
            self._expected = _COLON
        elif self._open:
            self._expected = _COMMA_OR_CLOSE
        else:
            self._expected = _DONE
            self.is_complete = True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("the number is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key stands twice")
    return members


def decode_strict(text: str) -> Any:
    """Decode strict JSON.

    Raises:
        ValueError: it is not (nesting that is too deep included).
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("the nesting is too deep") from None


def encode(value: Any) -> str:
    """Return the JSON text of a decoded value, readable, with keys in their order. ValueError for NaN and infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can spell
        return json.dumps(value, allow_nan=False)
    return text


def arguments_text(text: str) -> str | None:
    """Return the arguments of a call as the model wrote them, if they are a strict JSON object; nothing means `{}`."""
    stripped = text.strip()
    if not stripped:
        return "{}"
    try:
        return stripped if isinstance(decode_strict(stripped), dict) else None
    except ValueError:
        return None


def raw_members(text: str) -> dict[str, str] | None:
    """Return the members of a strict JSON object, each value as the text that the model wrote; None if it is none."""
    try:
        decoded = decode_strict(text)
    except ValueError:
        return None
    if not isinstance(decoded, dict):
        return None
    try:
        members = msgspec.json.decode(text.encode(), type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):  # half of a surrogate pair somewhere, which msgspec refuses
        return {name: encode(value) for name, value in decoded.items()}
    return {name: bytes(value).decode() for name, value in members.items()}


def is_tool_name(name: object) -> bool:
    """Whether `name` can be what a tool is called: short, and nothing in it that is white space or no character."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and " " not in name


def read_call(text: str) -> tuple[str, str] | None:
    """Read a call written as `{"name": ..., "arguments": {...}}`; return (name, text of its arguments), or None.

    `parameters` is taken for `arguments`. Arguments that are absent, null or "" mean that there are none, and a string
    that itself holds an object means that object. Other members are ignored.
    """
    members = raw_members(text)
    if members is None or "name" not in members or {"arguments", "parameters"} <= members.keys():
        return None
    name = decode_strict(members["name"])
    arguments = members.get("arguments", members.get("parameters", "null"))
    if arguments == "null":
        arguments = ""
    elif arguments.startswith('"'):
        arguments = decode_strict(arguments)
    checked = arguments_text(arguments)
    return (name, checked) if checked is not None and is_tool_name(name) else None
