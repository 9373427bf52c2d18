"""Calls as Qwen 3 Coder and 3.5 write them: a function with parameters between tags, values as they are, without types.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Values are raw text, so a tag counts only where the format goes on after it: `</parameter>` when the next parameter or
the end of the function follows. What models get wrong is read all the same: `<tool_call>` left out, everything on one
line, a parameter that is not closed before the next tag at the start of a line, a call inside a thought, which ends the
thought. Values get their types from the tool's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.api_server.parsers.base import Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.coerce import arguments_of
from octavo.api_server.parsers.json_scan import is_tool_name
from octavo.api_server.parsers.pull import THINK_CLOSE, PullParser, Reads

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NAME_ENDS = (">", "<", "\n")
AFTER_PARAMETER = (PARAMETER, FUNCTION_END, CALL_END)


class Value(NamedTuple):
    """A parameter's value as it stands between its tags, and what follows it.

    Attributes:
        text: the value, line breaks next to the tags included.
        follower: one of `AFTER_PARAMETER`; "" when the output ends in the value.
        key: name of the next parameter, "" when there is none or it has no proper name.
    """

    text: str
    follower: str
    key: str = ""


class QwenXmlParser(PullParser):
    """A thought between `<think>` and `</think>`, then content and calls."""

    def output(self) -> Reads[None]:
        marker = yield from self.first_thought(*self.if_offered(CALL))
        while marker == CALL:
            is_call = yield from self._call(marker, is_in_thought=True)
            marker = "" if is_call else (yield from self.pour(self.think, THINK_CLOSE, CALL))
        while marker := (yield from self.pour(self.say, *self.if_offered(CALL, FUNCTION))):
            yield from self._call(marker)

    def _call(self, marker: str, is_in_thought: bool = False) -> Reads[bool]:
        """Read a call from after its first marker, report it, and return whether it is one."""
        self.begin_raw(marker)
        call = yield from self._body(marker)
        if call is None and is_in_thought and not (self.is_over and self.is_cut):
            self.think(self.take_raw())
        else:
            self.report(call)
        if call is not None and is_in_thought:
            yield from self._skip(THINK_CLOSE)
        return call is not None

    def _body(self, marker: str) -> Reads[ToolCall | None]:
        if marker == CALL:
            yield from self.blanks()
            if not (yield from self.take(FUNCTION)):
                return None
        name = yield from self._name()
        if not name:
            return None
        schema = self.spec.schema_of(name)
        texts = yield from self._parameters((schema or {}).get("properties"))
        return None if texts is None else ToolCall(name, arguments_of(texts, schema))

    def _name(self) -> Reads[str]:
        """Read a name up to `>`; "" if it is none."""
        name, end = yield from self.until(*NAME_ENDS)
        if end == ">" and is_tool_name(name):
            return name
        self.put_back()
        return ""

    def _parameters(self, properties: Any) -> Reads[dict[str, str] | None]:
        """Read parameters and the tags that end the call; None if it is malformed."""
        known = properties if isinstance(properties, dict) else None
        texts: dict[str, str] = {}
        yield from self.blanks()
        follower = yield from self.take(*AFTER_PARAMETER)
        key = (yield from self._name()) if follower == PARAMETER else ""
        while follower == PARAMETER:
            if not key:
                return None
            value = yield from self._value(known)
            texts[key] = value.text.removeprefix("\n").removesuffix("\n")
            follower, key = value.follower, value.key
        if follower == FUNCTION_END:
            yield from self._skip(CALL_END)
        return texts if follower else None

    def _skip(self, marker: str) -> Reads[None]:
        """Read a marker if it comes next. Half of it at a cut is part of what was read, and nothing."""
        yield from self.blanks()
        yield from self.take(marker)
        if self.is_over and self.is_cut:
            self._text = ""

    def _value(self, known: Mapping[str, Any] | None) -> Reads[Value]:
        """Read a value and the tag behind it, with the next parameter's name if that is what follows."""
        line_break = "\n" if (yield from self.peek()) == "\n" else ""
        unclosed = (line_break + PARAMETER, line_break + FUNCTION_END)
        pieces: list[str] = []
        while True:
            text, marker = yield from self.until(PARAMETER_END, *unclosed)
            pieces.append(text)
            if not marker:
                return Value("", "")
            if marker == unclosed[0]:
                name, end = yield from self.until(*NAME_ENDS)
                if end == ">" and (known is None or name in known):
                    return Value("".join(pieces) + line_break, PARAMETER, name)
                self.put_back()
                pieces += (marker, name)
                continue
            blanks = yield from self.blanks()
            follower = yield from self.take(*(AFTER_PARAMETER if marker == PARAMETER_END else (CALL_END,)))
            if follower == PARAMETER:
                name = yield from self._name()
                return Value("".join(pieces), follower, name)
            if follower or (marker == unclosed[1] and self.is_over and not self.is_cut):
                return Value("".join(pieces), follower or FUNCTION_END)
            pieces += (marker, blanks)


def make_parser(spec: ParserSpec) -> Parser:
    return QwenXmlParser(spec)
