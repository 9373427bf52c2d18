"""Gemma 4: calls in an object notation of its own, thoughts in a channel.

    <|channel>thought
    ...<channel|>Let me see.<|tool_call>call:get_time{zone:<|"|>UTC<|"|>,days:[1,2]}<tool_call|>

The notation is JSON but for its strings: keys stand bare, with spaces if they have any, and other strings stand between
two `<|"|>`, nothing in them escaped. So it is read by writing JSON, and JSON's rules decide what is valid.
"""

from __future__ import annotations

from octavo.api_server.parsers.base import BLANKS, Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.json_scan import MAX_DEPTH, arguments_text, encode, is_tool_name
from octavo.api_server.parsers.pull import PullParser, Reads

CALL_BEGIN, CALL_END = "<|tool_call>", "<tool_call|>"
CALL_HEAD = "call:"
THOUGHT_BEGIN, THOUGHT_END = "<|channel>thought", "<channel|>"
QUOTE = '<|"|>'
MARKS = ("{", "}", "[", "]", ",", ":")
CLOSERS = {"{": "}", "[": "]"}


class GemmaParser(PullParser):
    def output(self) -> Reads[None]:
        markers = self.if_offered(CALL_BEGIN)
        if self.spec.has_reasoning:
            markers += (THOUGHT_BEGIN,)
        marker = THOUGHT_BEGIN if self.starts_in_thought else ""
        while True:
            if marker == THOUGHT_BEGIN:
                marker = yield from self.pour(self.think, THOUGHT_END)
                if marker:
                    self.end_thought()
            elif marker == CALL_BEGIN:
                self.begin_raw(marker)
                call = yield from self.body()
                self.report(call)
                marker = ""
            else:
                marker = yield from self.pour(self.say, *markers)
                if not marker:
                    return

    def body(self) -> Reads[ToolCall | None]:
        """Read a call from after its first marker to after its last one; None if it is malformed."""
        yield from self.blanks()
        if not (yield from self.take(CALL_HEAD)):
            return None
        name = yield from self.word("{")
        yield from self.blanks()
        text = (yield from self.json_text()) if is_tool_name(name) and (yield from self.peek()) == "{" else None
        if text is None:
            return None
        yield from self.blanks()
        is_closed = yield from self.take(CALL_END)
        arguments = arguments_text(text)
        return ToolCall(name, arguments) if is_closed and arguments is not None else None

    def json_text(self) -> Reads[str | None]:
        """Read one object; return the JSON that it stands for, which need not be valid, or None if it has no end."""
        pieces: list[str] = []
        closers: list[str] = []
        is_key = False
        while len(closers) <= MAX_DEPTH:
            yield from self.blanks()
            mark = yield from self.take(*MARKS, QUOTE)
            if mark == QUOTE:
                text, _ = yield from self.until(QUOTE)
                pieces.append(encode(text))
            elif not mark:
                bare = yield from self.bare(is_key)
                if bare is None:
                    return None
                pieces.append(bare)
            else:
                pieces.append(mark)
            if mark in CLOSERS:
                closers.append(CLOSERS[mark])
            elif mark in ("}", "]"):
                if closers.pop() != mark:
                    return None
                if not closers:
                    return "".join(pieces)
            is_key = mark in ("{", ",") and closers[-1] == "}"
        return None

    def bare(self, is_key: bool) -> Reads[str | None]:
        """Read a key or value that does not stand between `QUOTE`s; return its JSON, or None if it has no end."""
        if (yield from self.peek()) == '"':
            return (yield from self.json_value())
        text, marker = yield from self.until(*MARKS, QUOTE, CALL_END)
        self.put_back()
        if marker not in MARKS:
            return None
        text = text.rstrip(BLANKS)
        return encode(text) if is_key else text


def make_parser(spec: ParserSpec) -> Parser:
    return GemmaParser(spec)
