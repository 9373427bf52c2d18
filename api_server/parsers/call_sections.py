"""Formats that put the calls of an output into a section between markers, with markers around each call."""

from __future__ import annotations

from octavo.api_server.parsers.base import BLANKS, ToolCall
from octavo.api_server.parsers.pull import PullParser, Reads


class SectionParser(PullParser):
    """Base of the parsers of such formats.

    Before the sections stands content, and before that one thought.

    Text after the first call of a section belongs to nobody and is dropped. Where no call follows the marker of a
    section it is no section but text, unless its end follows.

    Attributes:
        section_begins, section_ends, call_begins, call_ends: markers; of one kind there may be several.
        may_begin_with_noise: text may stand before the first call as well.
        interrupts: those of `section_begins` that count in a thought too, and end it.
    """

    section_begins: tuple[str, ...]
    section_ends: tuple[str, ...]
    call_begins: tuple[str, ...]
    call_ends: tuple[str, ...]
    may_begin_with_noise = False
    interrupts: tuple[str, ...] = ()

    def body(self) -> Reads[ToolCall | None]:
        """Subclasses: read a call from after its first marker to after its last one; None if it is malformed."""
        raise NotImplementedError

    def output(self) -> Reads[None]:
        marker = yield from self.first_thought(*self.if_offered(*self.interrupts))
        while True:
            if marker in self.section_begins:
                yield from self.section(marker)
            marker = yield from self.pour(self.say, *self.if_offered(*self.section_begins))
            if not marker:
                return

    def section(self, marker: str) -> Reads[None]:
        """Read a section, from after the marker that begins it to after the one that ends it."""
        self.begin_raw(marker)
        has_call, is_empty = False, True
        while True:
            between, marker = yield from self._next_marker(has_call or self.may_begin_with_noise)
            is_empty = is_empty and not between.strip(BLANKS)
            if marker not in self.call_begins:
                break
            if has_call:
                self.begin_raw(marker)
            is_empty = False
            call = yield from self.body()
            if call is None:
                yield from self._pass_body()
            self.report(call)
            has_call = has_call or call is not None
        is_text = not has_call and not (marker and is_empty)
        if (marker or not self.drop_cut()) and is_text:
            self.say(self.take_raw())

    def _next_marker(self, may_have_noise: bool) -> Reads[tuple[str, str]]:
        """Read to the next call or the end of the section; return what stands before it, and its marker or ""."""
        if may_have_noise:
            return (yield from self.until(*self.call_begins, *self.section_ends))
        blanks = yield from self.blanks()
        return blanks, (yield from self.take(*self.call_begins, *self.section_ends))

    def is_closed(self) -> Reads[bool]:
        """Return whether a call whose arguments show that they are complete ends here.

        Models forget the closing marker: the next one, or the end of an output that was not cut, does as well.
        """
        yield from self.blanks()
        marker = yield from self.take(*self.call_ends, *self.call_begins, *self.section_ends)
        if marker not in self.call_ends:
            self.put_back()
        return bool(marker) or (self.is_over and not self.is_cut and not self._text)

    def _pass_body(self) -> Reads[None]:
        """Read the rest of a malformed call, up to where it ends or something else begins."""
        _, marker = yield from self.until(*self.call_ends, *self.call_begins, *self.section_ends)
        if marker not in self.call_ends:
            self.put_back()
