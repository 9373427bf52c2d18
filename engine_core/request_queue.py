"""The order in which requests wait.

Lower priority value first, then earlier arrival, then who came in first; so a preempted request returns to its own
place, before everyone younger. Invariant: `peek` is the first of all members. A heap holds the order and a dict the
members: leaving from the middle is O(1), and the heap forgets such entries when they reach the top or are the most.
Rejected: a deque (a returning request is not always the oldest) and a sorted list (O(n) in an abort storm).
"""

from __future__ import annotations

import heapq

from octavo.engine_core.request import OrderKey, Request

MIN_ENTRIES_TO_COMPACT = 64


class RequestQueue:
    """Waiting requests, first to be admitted first."""

    def __init__(self) -> None:
        self.members: dict[str, Request] = {}
        self._entries: list[tuple[OrderKey, Request]] = []  # keys are unique, so requests are never compared

    def __len__(self) -> int:
        return len(self.members)

    def push(self, request: Request) -> None:
        self.members[request.request_id] = request
        heapq.heappush(self._entries, (request.order, request))

    def peek(self) -> Request | None:
        """The first request, or None when nobody waits."""
        while self._entries and not self._is_member(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][1] if self._entries else None

    def remove(self, request: Request) -> None:
        """Take a member out, wherever it stands."""
        del self.members[request.request_id]
        if len(self._entries) > max(2 * len(self.members), MIN_ENTRIES_TO_COMPACT):
            self._entries = [entry for entry in self._entries if self._is_member(entry)]
            heapq.heapify(self._entries)

    def _is_member(self, entry: tuple[OrderKey, Request]) -> bool:
        """Whether the entry still counts; an id that came back after an abort is another request."""
        return self.members.get(entry[1].request_id) is entry[1]
