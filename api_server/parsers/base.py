"""What every parser of model output is made of: its events, its contract, and what keeps it split-invariant.

A parser takes the text of one choice in pieces and says what it is: thought, content or tool call.

Invariants of every parser:
- Any split of the text into pieces gives the same events, once neighbours of the same kind are joined (`join_events`).
- Time is linear in the text, whatever the text is. No regular expression ever sees it.
- Only what may still become a marker is held back, besides the body of a call and the white space at the edge of text.
- A call is reported once, complete, with arguments that are a strict JSON object; an incomplete one never.
- A malformed body comes out as the text that it is, markers included. Nothing raises on what a model wrote.

White space between markers is layout, not text: it is dropped around thoughts and calls (`TrimmedText` says exactly
where). Rejected: streaming arguments as they come, because a call that is cut off would have been half reported.

A family is a module with `make_parser(spec) -> Parser`, which `selection` lists under its name; `pull` has what it
reads its format with.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import msgspec

from octavo.api_server.conversation.tools import Tool
from octavo.api_server.generation.stop_strings import ROOT, StopAutomaton

BLANKS = " \t\r\n"
NUM_CACHED_AUTOMATA = 256


class Reasoning(NamedTuple):
    """More text of the model's thoughts."""

    text: str


class Content(NamedTuple):
    """More text of the answer."""

    text: str


class ToolCall(NamedTuple):
    """A complete call. `arguments` is the text of a strict JSON object, `{}` when there are none."""

    name: str
    arguments: str


Event = Reasoning | Content | ToolCall


class ParserSpec(msgspec.Struct, frozen=True):
    """What a parser of one request has to know.

    Attributes:
        family: name of the format, a key of `selection.FAMILIES`.
        tools: tools that the request offers and lets the model call. Without any, nothing is a call, and the markup of
            calls is text like any other. Some formats also look at them to tell a call from other JSON, and to give
            values without types the types of the tool's schema.
        starts_in_reasoning: the prompt ends inside a thought, so the output begins there.
        ends_generation_prompt: the end of the rendered prompt, for formats whose output goes on in the middle of a
            message that the prompt has begun; "" when it does not matter.
        has_reasoning: thoughts are told from content. When not, they are content, markers included.
    """

    family: str
    tools: tuple[Tool, ...] = ()
    starts_in_reasoning: bool = False
    ends_generation_prompt: str = ""
    has_reasoning: bool = True

    def schema_of(self, name: str) -> dict[str, Any] | None:
        """JSON schema of the arguments of the tool called `name`; None when no such tool is offered."""
        return next((tool.parameters for tool in self.tools if tool.name == name), None)


class Parser(Protocol):
    """The state of one choice's output. See the module's text for what holds for all of them."""

    def push(self, text: str) -> list[Event]:
        """Take more text; return what it completes, without empty events and without neighbours of the same kind."""
        ...

    def finish(self, is_cut: bool) -> list[Event]:
        """End the output; return what was held back.

        Args:
            is_cut: the output ended for its length and not by the model. A call that is incomplete then is nothing;
                otherwise it is a malformed one, hence content. Half a marker outside a call is text in both cases.
        """
        ...


def join_events(events: Iterable[Event]) -> list[Event]:
    """Events with neighbours of the same kind joined and empty ones left out."""
    joined: list[Event] = []
    for kind, run in groupby((event for event in events if isinstance(event, ToolCall) or event.text), type):
        if kind is ToolCall:
            joined.extend(run)
        else:
            text = "".join(event.text for event in run if not isinstance(event, ToolCall))
            joined.append(Reasoning(text) if kind is Reasoning else Content(text))
    return joined


class Scan(NamedTuple):
    """What `MarkerScanner.push` found.

    Attributes:
        before: text that belongs to no marker, what was held back before included; final.
        marker: the first marker that is complete, or "".
        rest: the text after the marker; "" when there is none.
    """

    before: str
    marker: str
    rest: str


@lru_cache(NUM_CACHED_AUTOMATA)
def _automaton(markers: tuple[str, ...]) -> StopAutomaton:
    for marker in markers:
        if not marker or any(marker is not other and marker in other for other in markers):
            raise ValueError(f"marker {marker!r} is empty or part of another one")
    return StopAutomaton(markers)


class MarkerScanner:
    """Finds the first of some fixed markers in text that comes in pieces. Holds back only a proper start of a marker.

    Args:
        markers: not empty; none contains another (ValueError), so the first that ends is the first that begins.
    """

    def __init__(self, *markers: str) -> None:
        self._automaton = _automaton(markers)
        self._first_characters = self._automaton.children[ROOT].keys()
        self._node = ROOT
        self._held = ""

    def push(self, text: str) -> Scan:
        """Take more text. After a marker the scanner is as new: push the rest again to find the next one."""
        if self._node == ROOT and self._first_characters.isdisjoint(text):
            return Scan(text, "", "")
        for num_chars, character in enumerate(text, 1):
            self._node = self._automaton.step(self._node, character)
            marker = self._automaton.match[self._node]
            if marker is not None:
                before = (self._held + text[:num_chars])[: -len(marker)]
                self._node, self._held = ROOT, ""
                return Scan(before, marker, text[num_chars:])
        pending = self._held + text
        num_safe = len(pending) - self._automaton.depth[self._node]
        self._held = pending[num_safe:]
        return Scan(pending[:num_safe], "", "")

    def finish(self) -> str:
        """Return what is held back, because no more text comes; the scanner is as new."""
        held, self._held, self._node = self._held, "", ROOT
        return held


class TrimmedText:
    """Text of one kind, whose white space next to thoughts and calls is dropped.

    White space at the end of what came so far is held back until it is known whether more text follows. Around an edge
    (`seal`) it belongs to the text only where text stands on both sides, because then the edge is in the middle of
    something; white space between two edges belongs to nobody.
    """

    def __init__(self, is_sealed: bool = False) -> None:
        self._is_sealed = is_sealed
        self._has_text = False
        self._before_edge = ""
        self._blanks: list[str] = []

    def push(self, text: str) -> str:
        """Take more text; return what is final."""
        body = text.rstrip(BLANKS)
        tail = text[len(body) :]
        if not body:
            self._blanks.append(tail)
            return ""
        gap = self._before_edge + "".join(self._blanks)
        if self._is_sealed and not self._has_text:
            gap, body = "", body.lstrip(BLANKS)
        self._is_sealed, self._has_text, self._before_edge, self._blanks = False, True, "", [tail]
        return gap + body

    def seal(self) -> None:
        """Here stands a thought or a call."""
        if not self._is_sealed:
            self._before_edge = "".join(self._blanks)
        self._blanks = []
        self._is_sealed = True

    def finish(self) -> str:
        """Return the white space at the end, if it belongs to the text."""
        blanks = "" if self._is_sealed else "".join(self._blanks)
        self._blanks, self._before_edge = [], ""
        return blanks


class EventParser:
    """What parsers share: the spec, and the events that are to be given next.

    Attributes:
        spec: what the request told us.
    """

    def __init__(self, spec: ParserSpec) -> None:
        self.spec = spec
        self._events: list[Event] = []
        self._content = TrimmedText()
        self._reasoning = TrimmedText(is_sealed=True)

    def finish(self, is_cut: bool) -> list[Event]:
        self.end(is_cut)
        self._events += (Reasoning(self._reasoning.finish()), Content(self._content.finish()))
        return self._take()

    def end(self, is_cut: bool) -> None:
        """Subclasses: let go of what is held back."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Give `text` as content."""
        self._events.append(Content(self._content.push(text)))

    def think(self, text: str) -> None:
        """Give `text` as reasoning."""
        self._events.append(Reasoning(self._reasoning.push(text)))

    def end_thought(self) -> None:
        """A thought ends here: white space on both sides is layout."""
        self._reasoning.seal()
        self._content.seal()

    def call(self, name: str, arguments: str) -> None:
        """Report a complete call; the white space around it is layout."""
        self._content.seal()
        self._reasoning.seal()
        self._events.append(ToolCall(name, arguments))

    def _take(self) -> list[Event]:
        events, self._events = join_events(self._events), []
        return events
