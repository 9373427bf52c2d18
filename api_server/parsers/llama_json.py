"""Calls as Llama 3 writes them: the whole output is a JSON object with the name of a tool, or several joined by `;`.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

`<|python_tag|>` may stand before it, and then text before that. Without the tag nothing tells a call from an answer in
JSON but what it says. So an object is held until the output ends, and it is content if anything else stands behind it
or if its name is not an offered tool. One whose first key cannot be a call's is let go at once.
"""

from __future__ import annotations

from octavo.api_server.parsers.base import Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.json_scan import encode, read_call
from octavo.api_server.parsers.pull import PullParser, Reads

PYTHON_TAG = "<|python_tag|>"
SEPARATOR = ";"
KEYS = ('"name"', '"parameters"', '"arguments"', '"type"', '"id"')


class LlamaJsonParser(PullParser):
    """Content or calls."""

    def output(self) -> Reads[None]:
        blanks = yield from self.blanks()
        if self.spec.tools and (yield from self.peek()) == "{":
            yield from self._objects(blanks)
        else:
            self.say(blanks)
        while marker := (yield from self.pour(self.say, *self.if_offered(PYTHON_TAG))):
            yield from self._objects(marker)

    def _objects(self, before: str) -> Reads[None]:
        """Read objects up to the end of the output; if anything else comes, all of it is content.

        Args:
            before: what was read before the first object.
        """
        self.begin_raw(before)
        calls: list[ToolCall] = []
        call: ToolCall | None = None
        is_joined = True
        while is_joined:
            yield from self.blanks()
            call = yield from self._object()
            if call is None:
                break
            calls.append(call)
            yield from self.blanks()
            is_joined = bool((yield from self.take(SEPARATOR)))
        if self.is_over and not self._text and (calls or before == PYTHON_TAG or self._names_tool()):
            self._report_all(calls, call is not None)
        else:
            self.say(self.take_raw())

    def _report_all(self, calls: list[ToolCall], is_whole: bool) -> None:
        """The output ended behind these calls, or in one that is malformed or cut off."""
        if not is_whole and not self.is_cut:
            self.say(self.take_raw())
            return
        for call in calls:
            self.report(call)

    def _object(self) -> Reads[ToolCall | None]:
        """Read a call of an offered tool; None if it is none."""
        if not (yield from self._may_be_call()):
            return None
        text = yield from self.json_value()
        call = read_call(text) if text is not None else None
        return ToolCall(*call) if call is not None and self.spec.schema_of(call[0]) is not None else None

    def _may_be_call(self) -> Reads[bool]:
        """Return whether the object that begins here has a call's key first; nothing is taken."""
        num_read = len(self._raw)
        yield from self.take("{")
        yield from self.blanks()
        key = yield from self.take(*KEYS)
        self._text = "".join(self._raw[num_read:]) + self._text
        del self._raw[num_read:]
        return bool(key) or (self.is_over and self._text.startswith("{"))

    def _names_tool(self) -> bool:
        """Whether what was read has the name of an offered tool in it."""
        raw = "".join(self._raw)
        return any(encode(tool.name) in raw for tool in self.spec.tools)


def make_parser(spec: ParserSpec) -> Parser:
    return LlamaJsonParser(spec)
