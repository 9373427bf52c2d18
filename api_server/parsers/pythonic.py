"""Calls as Llama 4 writes them: the whole output is a list of calls in Python's notation.

    [get_weather(city='Paris', days=3), get_time()]

`<|python_start|>` and `<|python_end|>` may stand around it. A list may as well be the answer, so it is held until the
output ends, and is content if anything else stands beside it or if not all of it is calls of offered tools with named
arguments. One that does not begin with such a call is let go at once.
"""

from __future__ import annotations

from octavo.api_server.parsers.base import Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.json_scan import encode
from octavo.api_server.parsers.pull import PullParser, Reads
from octavo.api_server.parsers.python_literals import read_calls

START, END = "<|python_start|>", "<|python_end|>"
OPENERS, CLOSERS, QUOTES = "([{", ")]}", "'\""


class PythonicParser(PullParser):
    """Content or calls."""

    def output(self) -> Reads[None]:
        blanks = yield from self.blanks()
        if self.spec.tools and (yield from self.peek()) == "[":
            yield from self._list(blanks)
        else:
            self.say(blanks)
        while marker := (yield from self.pour(self.say, *self.if_offered(START))):
            yield from self._list(marker)

    def _list(self, before: str) -> Reads[None]:
        """Read a list of calls up to the end of the output; if anything else comes, all of it is content.

        Args:
            before: what was read before the list.
        """
        self.begin_raw(before)
        yield from self.blanks()
        num_read = len(self._raw)
        has_begun = yield from self._begins()
        is_closed = has_begun and (yield from self._closes())
        text = "".join(self._raw[num_read:])
        if is_closed:
            yield from self.blanks()
            yield from self.take(END)
            yield from self.blanks()
        is_end = self.is_over and not self._text
        calls = self._read(text) if is_closed and is_end else []
        if calls or (has_begun and not is_closed and self.is_cut):
            for call in calls:
                self.report(call)
        else:
            self.say(self.take_raw())

    def _begins(self) -> Reads[bool]:
        """Read the start of a list up to the parenthesis behind the name of an offered tool, or to the end."""
        if not (yield from self.take("[")):
            return self.is_over
        yield from self.blanks()
        name = yield from self.take(*(f"{tool.name}(" for tool in self.spec.tools))
        return bool(name) or self.is_over

    def _closes(self) -> Reads[bool]:
        """Read the rest of the list up to the bracket that closes it; False if none does."""
        depth = 2
        while depth:
            _, marker = yield from self.until(*OPENERS, *CLOSERS, *QUOTES)
            if not marker:
                return False
            if marker in QUOTES:
                yield from self._string(marker)
            else:
                depth += 1 if marker in OPENERS else -1
        return True

    def _string(self, quote: str) -> Reads[None]:
        """Read a string from after its first quote to after its last."""
        marker = ""
        while marker != quote:
            _, marker = yield from self.until(quote, "\\")
            if marker == "\\":
                self._raw.append((yield from self.peek()))
                self._text = self._text[1:]
            elif not marker:
                return

    def _read(self, text: str) -> list[ToolCall]:
        """Return the calls of a list; none at all if any of it is something else."""
        try:
            calls = [ToolCall(name, encode(arguments)) for name, arguments in read_calls(text)]
        except ValueError:
            return []
        return calls if all(self.spec.schema_of(call.name) is not None for call in calls) else []


def make_parser(spec: ParserSpec) -> Parser:
    return PythonicParser(spec)
