"""Requests of which every step computes one token, and nothing else changes: they are not touched.

A steady request's lengths grow by one with every step, so they need no writing down: the set has a clock, and `settle`
adds the steps since it last did. A calendar says when a request needs attention: when its block table is full, or
when its last token is pending. So the cost of a step grows with what changes, not with how many requests run; the
workers keep the same list (see `protocol.worker_messages`). Invariant: a member's lengths are exact whenever it is
looked at through `due` or `leave`; in between they stand at what they were when last settled. Rejected: one counter
per request and step, which is what made the cost of a step proportional to the number of requests.
"""

from __future__ import annotations

from octavo.engine_core.request import Request

NOT_STEADY = -1


class SteadySet:
    """The members, in the order in which they joined, and the calendar."""

    def __init__(self) -> None:
        self.members: dict[str, Request] = {}
        self.clock = 0
        self._calendar: dict[int, list[Request]] = {}

    def __len__(self) -> int:
        return len(self.members)

    def join(self, request: Request) -> None:
        """Take a request in that lacks exactly one token; then say when it needs attention by `call_at`."""
        request.settled_at = self.clock
        self.members[request.request_id] = request

    def call_in(self, request: Request, num_steps: int) -> None:
        """Have `due` return the request once `num_steps` more steps have been scheduled; 0 is before the next one."""
        request.due_at = self.clock + num_steps
        self._calendar.setdefault(request.due_at, []).append(request)

    def due(self) -> list[Request]:
        """Members that need attention before the next step, oldest first, settled. Each has to be called anew."""
        called = self._calendar.pop(self.clock, None)
        if called is None:
            return []
        is_due = (request for request in called if request.settled_at != NOT_STEADY and request.due_at == self.clock)
        due = sorted(dict.fromkeys(is_due), key=lambda request: request.order)  # who left and came back is there twice
        for request in due:
            self.settle(request)
        return due

    def leave(self, request: Request) -> None:
        """Let a member go, settled."""
        self.settle(request)
        request.settled_at = NOT_STEADY
        request.due_at = NOT_STEADY
        del self.members[request.request_id]

    def settle(self, request: Request) -> None:
        """Bring a member's lengths up to date."""
        num_steps = self.clock - request.settled_at
        request.num_computed_tokens += num_steps
        request.num_tokens += num_steps
        request.settled_at = self.clock

    def advance(self) -> None:
        """A step was scheduled: every member got its token, and the next is pending."""
        self.clock += 1
