"""Harmony, the format of gpt-oss: an output is messages, each with a channel, and some of them with a recipient.

    <|channel|>analysis<|message|>Let me look.<|end|>
    <|start|>assistant to=functions.get_time<|channel|>commentary <|constrain|>json<|message|>{"zone": "UTC"}<|call|>

without the line breaks. The prompt has begun the first message. `analysis` is thought and every other channel content;
what has a tool for its recipient is a call, whose recipient stands before or after the channel. A message to anybody
else, such as the model's own Python, is for nobody here and is dropped.

A marker ends a message where the next message or the end of the output follows, so that text may speak of the format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from octavo.api_server.parsers.base import Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.json_scan import is_tool_name
from octavo.api_server.parsers.pull import PullParser, Reads

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT, FUNCTIONS = "to=", "functions."
ASSISTANT, ANALYSIS = "assistant", "analysis"
THOUGHT_BEGIN = f"{CHANNEL}{ANALYSIS}{MESSAGE}"


class Header(NamedTuple):
    """What stands before `MESSAGE`. Either is "" when it does not say; a message to the assistant is to nobody."""

    channel: str
    recipient: str


class HarmonyParser(PullParser):
    def __init__(self, spec: ParserSpec) -> None:
        self._has_said = self._has_thought = False
        super().__init__(spec)

    def output(self) -> Reads[None]:
        if self.starts_in_thought:
            yield from self.message(Header(ANALYSIS, ""))
        else:
            blanks = yield from self.blanks()
            if (yield from self.take(RECIPIENT, CHANNEL, CONSTRAIN, MESSAGE, START)):
                self.put_back()
            else:
                self.say(blanks)
                yield from self.message(Header("", ""))
        while (yield from self.has_text()):
            self.begin_raw("")
            yield from self.take(START)
            header, marker = yield from self.until(MESSAGE, START, *ENDS)
            if marker == MESSAGE:
                yield from self.message(read_header(header))
                continue
            if marker == START:
                self.put_back()
            self.report(None)

    def message(self, header: Header) -> Reads[None]:
        """Read a message from after its header to after the marker that ends it."""
        name = header.recipient.removeprefix(FUNCTIONS)
        if name != header.recipient or self.spec.schema_of(name) is not None:
            yield from self.call_message(name)
        elif header.recipient:
            yield from self.text(lambda _: None)
        elif header.channel != ANALYSIS or not self.spec.has_reasoning:
            if self._has_said:
                self.say("\n")
            self._has_said = True
            if header.channel == ANALYSIS:
                self.say(self.take_raw())
            yield from self.text(self.say)
        else:
            if self._has_thought:
                self.think("\n")
            self._has_thought = True
            is_closed = yield from self.text(self.think)
            if is_closed:
                self.end_thought()

    def call_message(self, name: str) -> Reads[None]:
        """Read a message to a tool, whose text is the arguments."""
        call = (yield from self.body(name)) if self.spec.tools else None
        self.report(call)
        if call is None:
            yield from self.text(self.say)

    def body(self, name: str) -> Reads[ToolCall | None]:
        """Read the arguments of a call, up to after the marker that ends the message; None if they are malformed."""
        arguments = yield from self.json_arguments()
        if arguments is None or not is_tool_name(name):
            return None
        yield from self.blanks()
        marker = yield from self.take(*ENDS)
        yield from self.blanks()
        is_closed = (yield from self.is_message_over()) and (marker or not (self.is_over and self.is_cut))
        return ToolCall(name, arguments) if is_closed else None

    def text(self, into: Callable[[str], None]) -> Reads[bool]:
        """Give the text of a message to `into`, and read the marker that ends it; return whether there is one."""
        while marker := (yield from self.pour(into, *ENDS)):
            blanks = yield from self.blanks()
            if (yield from self.is_message_over()):
                return True
            into(marker + blanks)
        return False

    def is_message_over(self) -> Reads[bool]:
        """Return whether another message begins here, or there is no more text."""
        if (yield from self.take(START, CHANNEL)):
            self.put_back()
            return True
        return not (yield from self.has_text())


def read_header(text: str) -> Header:
    """Read a header. Of several channels the last counts, and a recipient after it rather than one before."""
    role, *channels = (part.replace(CONSTRAIN, " ").split() for part in text.split(CHANNEL))
    words = channels[-1] if channels else []
    channel = words[0] if words and not words[0].startswith(RECIPIENT) else ""
    recipients = [word.removeprefix(RECIPIENT) for word in (*words, *role) if word.startswith(RECIPIENT)]
    recipient = recipients[0] if recipients else ""
    return Header(channel, "" if recipient == ASSISTANT else recipient)


def make_parser(spec: ParserSpec) -> Parser:
    return HarmonyParser(spec)
