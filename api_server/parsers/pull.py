"""Parsers that are written as their format is read: from the front, asking for text where they need it.

A call of these formats has many parts in a fixed order: name, key, value, next key. Pushed text would need a state for
each. Here `output` is one generator that reads the parts one after the other and rests wherever text is missing, so its
own position is the state. That it is split-invariant follows from the readers: what each of them returns depends on the
text that stands there, never on the pieces in which it came.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TypeVar

from octavo.api_server.parsers.base import BLANKS, Event, EventParser, MarkerScanner, ParserSpec, ToolCall
from octavo.api_server.parsers.json_scan import MAX_NAME_CHARACTERS, JsonScanner, arguments_text

T = TypeVar("T")
Reads = Generator[None, str, T]

# Longer texts are read in pieces of so many characters: a reader that stops in the middle copies what is left.
PIECE_LENGTH = 1024

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class PullParser(EventParser):
    """Base of the parsers that read.

    Attributes:
        is_over: a reader has asked for more text than there was. Text that it looked at and left may still be there.
        is_cut: the output ended for its length; known once it is over.
        starts_in_thought: the output begins in a thought that is to be told from content.
    """

    def __init__(self, spec: ParserSpec) -> None:
        super().__init__(spec)
        self._text = ""
        self._later: list[str] = []
        self._raw: list[str] = []
        self.is_over = False
        self.is_cut = False
        self.starts_in_thought = spec.has_reasoning and spec.starts_in_reasoning
        self._reading = self.output()
        next(self._reading)

    def push(self, text: str) -> list[Event]:
        for piece in _pieces(text):
            self._reading.send(piece)
        return self._take()

    def end(self, is_cut: bool) -> None:
        self.is_over, self.is_cut = True, is_cut
        with suppress(StopIteration):
            self._reading.send("")

    def output(self) -> Reads[None]:
        """Subclasses: read the whole output. Begin with a reader; return when there is no more text."""
        raise NotImplementedError

    def has_text(self) -> Reads[bool]:
        """Return whether text stands here; rest until that is known."""
        if not self._text and self._later:
            self._text = self._later.pop()
        elif not self._text and not self.is_over:
            self._text = yield
        return bool(self._text)

    def peek(self) -> Reads[str]:
        """Return the character that stands here, or ""."""
        yield from self.has_text()
        return self._text[:1]

    def pour(self, into: Callable[[str], None], *markers: str) -> Reads[str]:
        """Give text to `into`, as it comes, up to the first of the markers; return that one, or "" at the end."""
        if not markers:
            while (yield from self.has_text()):
                into(self._text)
                self._text = ""
            return ""
        scanner = MarkerScanner(*markers)
        while (yield from self.has_text()):
            scan = scanner.push(self._text)
            self._text = scan.rest
            into(scan.before)
            if scan.marker:
                return scan.marker
        into(scanner.finish())
        return ""

    def until(self, *markers: str) -> Reads[tuple[str, str]]:
        """Return the text up to the first of the markers, and that one, or "" at the end."""
        pieces: list[str] = []
        marker = yield from self.pour(pieces.append, *markers)
        text = "".join(pieces)
        self._raw += (text, marker)
        return text, marker

    def take(self, *literals: str) -> Reads[str]:
        """Return the one of `literals` that stands here, or "" and leave what stands here. None may begin another."""
        seen = ""
        while (yield from self.has_text()):
            seen, self._text = seen + self._text, ""
            if not any(len(literal) > len(seen) and literal.startswith(seen) for literal in literals):
                break
        literal = next((literal for literal in literals if seen.startswith(literal)), "")
        self._text = seen[len(literal) :]
        self._raw.append(literal)
        return literal

    def blanks(self) -> Reads[str]:
        """Return the white space that stands here."""
        pieces: list[str] = []
        while (yield from self.has_text()):
            rest = self._text.lstrip(BLANKS)
            pieces.append(self._text[: len(self._text) - len(rest)])
            self._text = rest
            if rest:
                break
        self._raw += pieces
        return "".join(pieces)

    def word(self, stop: str) -> Reads[str]:
        """Return what stands here up to white space or the character `stop`, or a name's greatest length of it."""
        word = ""
        while len(word) < MAX_NAME_CHARACTERS and (yield from self.has_text()):
            part = self._text[: MAX_NAME_CHARACTERS - len(word)].partition(stop)[0]
            part = part.split(maxsplit=1)[0] if part and not part[0].isspace() else ""
            word += part
            self._text = self._text[len(part) :]
            if self._text:
                break
        self._raw.append(word)
        return word

    def json_value(self) -> Reads[str | None]:
        """Return the JSON value that stands here, or None if none does or it is incomplete."""
        scanner = JsonScanner()
        while not (scanner.is_complete or scanner.is_malformed) and (yield from self.has_text()):
            num_taken = scanner.push(self._text)
            self._text = self._text[num_taken:]
        scanner.finish()
        self._raw.append(scanner.text)
        return scanner.text if scanner.is_complete else None

    def json_arguments(self) -> Reads[str | None]:
        """Return the arguments that stand here as a strict JSON object, `{}` if none do, None if they are malformed."""
        yield from self.blanks()
        if (yield from self.peek()) != "{":
            return "{}"
        value = yield from self.json_value()
        return None if value is None else arguments_text(value)

    def raw_value(self, ends: tuple[str, ...], followers: tuple[str, ...]) -> Reads[tuple[str, bool]]:
        """Return text that is not escaped, up to one of `ends` after which one of `followers` stands.

        So a marker that is part of the value, because the value speaks of the format, does not end it. White space may
        stand before the follower, and is taken; the follower is left.

        Returns the text and whether it has such an end; without one it is all text that there is.
        """
        pieces: list[str] = []
        while True:
            text, marker = yield from self.until(*ends)
            pieces.append(text)
            if not marker:
                return "".join(pieces), False
            blanks = yield from self.blanks()
            if (yield from self.take(*followers)):
                self.put_back()
                return "".join(pieces), True
            pieces += (marker, blanks)

    def if_offered(self, *markers: str) -> tuple[str, ...]:
        """Return markers of calls: none if there is no tool, because then they are text."""
        return markers if self.spec.tools else ()

    def put_back(self) -> None:
        """Leave the marker or literal that was read last, if one was, for the next reader."""
        self._text = self._raw.pop() + self._text

    def unread(self, text: str) -> None:
        """Leave `text`, which ended with the output, for the next reader."""
        self._later = _pieces(text)[::-1]

    def begin_raw(self, marker: str) -> None:
        """From here on remember what is read, beginning with `marker`."""
        self._raw = [marker]

    def take_raw(self) -> str:
        """Return what was read since `begin_raw`, and forget it."""
        raw, self._raw = "".join(self._raw), []
        return raw

    def report(self, call: ToolCall | None) -> None:
        """Report the call that was read since `begin_raw`; None is a call that is none: give back what it was.

        One that is incomplete because the output was cut is nothing.
        """
        raw = self.take_raw()
        if call is not None:
            self.call(*call)
        elif not self.drop_cut():
            self.say(raw)

    def drop_cut(self) -> bool:
        """Drop what is left of a call, if the output was cut in it; return whether it was."""
        was_cut = self.is_over and self.is_cut
        if was_cut:
            self._content.seal()
            self._text = ""
        return was_cut

    def first_thought(self, *others: str) -> Reads[str]:
        """Read the thought with which the output begins, between `THINK_OPEN` and `THINK_CLOSE`, if there is one.

        Returns the marker that ended it, which may also be one of `others`; "" if there is no thought or no end.
        """
        blanks = yield from self.blanks()
        is_opened = self.spec.has_reasoning and (yield from self.take(THINK_OPEN))
        if not is_opened and not self.starts_in_thought:
            self.say(blanks)
            return ""
        marker = yield from self.pour(self.think, THINK_CLOSE, *others)
        if marker:
            self.end_thought()
        return marker


def _pieces(text: str) -> list[str]:
    return [text[start : start + PIECE_LENGTH] for start in range(0, len(text), PIECE_LENGTH)]
