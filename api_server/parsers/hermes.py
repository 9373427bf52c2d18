"""Calls as Hermes and Qwen 2.5 and 3 write them: JSON objects with name and arguments between two markers.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The JSON scanner and not the closing marker finds the end of the object, so markers inside its strings are text. A model
that goes on with the next call, or stops, without the closing marker has made a call; one that is cut off has not.
"""

from __future__ import annotations

from octavo.api_server.parsers.base import Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.json_scan import read_call
from octavo.api_server.parsers.pull import PullParser, Reads

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(PullParser):
    """A thought between `<think>` and `</think>`, then content and calls."""

    def output(self) -> Reads[None]:
        yield from self.first_thought()
        while marker := (yield from self.pour(self.say, *self.if_offered(OPEN))):
            while marker == OPEN:
                self.begin_raw(OPEN)
                marker = yield from self._call()

    def _call(self) -> Reads[str]:
        """Read a call from after its first marker; return the marker behind it, or "" if it is malformed."""
        yield from self.blanks()
        text = (yield from self.json_value()) if (yield from self.peek()) == "{" else None
        call = read_call(text) if text is not None else None
        if call is None:
            self.report(None)
            return ""
        yield from self.blanks()
        marker = yield from self.take(CLOSE, OPEN)
        is_closed = bool(marker) or (self.is_over and not self.is_cut and not self._text)
        self.report(ToolCall(*call) if is_closed else None)
        return marker


def make_parser(spec: ParserSpec) -> Parser:
    return HermesParser(spec)
