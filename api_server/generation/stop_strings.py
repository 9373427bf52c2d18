"""Finds stop strings in a growing text, without ever letting go of the first letters of one.

The rule: generation stops at the stop string that is complete first; of several that are complete at the same
character, the longest counts, and the text before it is the answer. So the decision never waits for text to come, and
it is the same however the text is cut into pieces. Rejected: the stop string that starts first, because with `bc` and
`abcd` the text `abc` would have to go on to be decided.

Method: the automaton of Aho and Corasick (1975), one step per character whatever the number of stop strings. Its depth
is the longest end of the text that begins a stop string, which is exactly what must be held back.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

ROOT = 0
NUM_CACHED_AUTOMATA = 16  # the choices of a request share one


class StopAutomaton:
    """All stop strings as one automaton; immutable once built.

    Attributes:
        children: per node, character -> node.
        fallback: per node, the node of its longest proper end that also begins a stop string.
        depth: per node, its number of characters.
        match: per node, the longest stop string that ends here.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.fallback = [ROOT]
        self.depth = [0]
        self.match: list[str | None] = [None]
        for text in stop:
            self._add(text)
        self._link()

    def step(self, node: int, character: str) -> int:
        """Return the node after `character`; linear over a whole text."""
        while (child := self.children[node].get(character)) is None:
            if node == ROOT:
                return ROOT
            node = self.fallback[node]
        return child

    def _add(self, text: str) -> None:
        node = ROOT
        for character in text:
            if character not in self.children[node]:
                self.children[node][character] = len(self.children)
                self.children.append({})
                self.fallback.append(ROOT)
                self.depth.append(self.depth[node] + 1)
                self.match.append(None)
            node = self.children[node][character]
        self.match[node] = text

    def _link(self) -> None:
        queue = deque(self.children[ROOT].values())
        while queue:
            node = queue.popleft()
            for character, child in self.children[node].items():
                self.fallback[child] = self.step(self.fallback[node], character)
                self.match[child] = self.match[child] or self.match[self.fallback[child]]
                queue.append(child)


@lru_cache(NUM_CACHED_AUTOMATA)
def _automaton(stop: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(stop)


class StopStringMatcher:
    """The stop strings of one output. Empty ones are ignored."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._automaton = _automaton(tuple(filter(None, stop)))
        self._first_characters = self._automaton.children[ROOT].keys()
        self._node = ROOT
        self._held = ""

    def push(self, text: str, can_stop: bool = True) -> tuple[str, str | None]:
        """Take more text; return (text that is safe to send, stop string that is complete or None).

        After a match the rest of `text` is dropped, and nothing is held. With `can_stop` False, stop strings that are
        complete within `text` do not count, but one that begins there and is complete later does.
        """
        if self._node == ROOT and self._first_characters.isdisjoint(text):
            return text, None
        for num_chars, character in enumerate(text, 1):
            self._node = self._automaton.step(self._node, character)
            stop = self._automaton.match[self._node]
            if stop is not None and can_stop:
                before = (self._held + text[:num_chars])[: -len(stop)]
                self._node, self._held = ROOT, ""
                return before, stop
        return self._release(text), None

    def flush(self) -> str:
        """Return what is held back, when no more text comes."""
        held, self._held, self._node = self._held, "", ROOT
        return held

    def _release(self, text: str) -> str:
        while self._node != ROOT and not self._automaton.children[self._node]:
            self._node = self._automaton.fallback[self._node]  # a whole stop string that did not count
        pending = self._held + text
        num_safe = len(pending) - self._automaton.depth[self._node]
        self._held = pending[num_safe:]
        return pending[:num_safe]
