"""Who is let in: a bound on the requests that are accepted and not yet finished.

Invariant: at most `max_live_requests` requests of the engine core are live, unless a single HTTP request with several
choices is alone and asks for more. A refusal comes before the body is read, or at least before its text is touched.
Rejected: waiting here, because the waiting queue belongs to the engine core, and a client that is told at once can go
to another replica.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from octavo.api_server.errors import ApiError, ErrorKind


class Ticket:
    """The place of one HTTP request: one live request at first, more once its number of choices is known."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.num_requests = 1

    def grow(self, num_requests: int) -> None:
        """Take places for `num_requests` in all; raise ApiError (429) when they are not there."""
        admission = self.admission
        others = admission.num_live_requests - self.num_requests
        if others and others + num_requests > admission.max_live_requests:
            raise admission.refusal()
        admission.num_live_requests = others + num_requests
        self.num_requests = num_requests

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.admission.leave(self)


class Admission:
    """The count of what is live."""

    def __init__(self, max_live_requests: int) -> None:
        self.max_live_requests = max_live_requests
        self.num_live_requests = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def enter(self) -> Ticket:
        """Return a ticket to be used as a context manager; raise ApiError (429) when the server is full."""
        if self.num_live_requests >= self.max_live_requests:
            raise self.refusal()
        self.num_live_requests += 1
        self.idle.clear()
        return Ticket(self)

    def leave(self, ticket: Ticket) -> None:
        self.num_live_requests -= ticket.num_requests
        if not self.num_live_requests:
            self.idle.set()

    def refusal(self) -> ApiError:
        text = f"the server has {self.num_live_requests} live requests and takes at most {self.max_live_requests}"
        return ApiError(ErrorKind.OVERLOADED, f"{text}; try again later")
