"""Who is let in: bounds on the requests that are accepted and not yet finished, and on the tokens that wait.

Invariants: at most `max_live_requests` requests of the engine core are live, and the prompts that have no output yet
have at most `max_queued_tokens` tokens, unless a single HTTP request is alone and asks for more. Whatever ends an HTTP
request gives back all that it took. A refusal comes before the body is read, or at least before the engine core hears
of it. Rejected: waiting here, because the waiting queue belongs to the engine core, and a client that is told at once
can go to another replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from octavo.api_server.errors import ApiError, ErrorKind


class Ticket:
    """The place of one HTTP request: one live request at first, more once its number of choices is known."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.num_requests = 1
        self._queued_tokens: dict[int, int] = {}

    def grow(self, num_requests: int) -> None:
        """Take places for `num_requests` in all; raise ApiError (429) when they are not there."""
        admission = self.admission
        others = admission.num_live_requests - self.num_requests
        if others and others + num_requests > admission.max_live_requests:
            raise admission.too_many_requests()
        admission.num_live_requests = others + num_requests
        self.num_requests = num_requests

    def queue(self, prompt_lengths: Sequence[int]) -> None:
        """Count the tokens of each prompt until `start`; raise ApiError (429) when they are too many."""
        admission, num_tokens = self.admission, sum(prompt_lengths)
        if admission.num_queued_tokens and not admission.has_room_for(num_tokens):
            raise admission.too_many_tokens()
        admission.num_queued_tokens += num_tokens
        self._queued_tokens = dict(enumerate(prompt_lengths))

    def start(self, prompt_index: int) -> None:
        """Prompt number `prompt_index` has its first output, or its ending; may be called again."""
        self.admission.num_queued_tokens -= self._queued_tokens.pop(prompt_index, 0)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for prompt_index in [*self._queued_tokens]:
            self.start(prompt_index)
        self.admission.leave(self)


class Admission:
    """The count of what is live and of what waits.

    Attributes:
        max_queued_tokens: None until the size of the KV memory is known; then nothing is refused for its tokens.
    """

    def __init__(self, max_live_requests: int, max_queued_tokens: int | None = None) -> None:
        self.max_live_requests = max_live_requests
        self.max_queued_tokens = max_queued_tokens
        self.num_live_requests = 0
        self.num_queued_tokens = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def enter(self) -> Ticket:
        """Return a ticket to be used as a context manager; raise ApiError (429) when the server is full."""
        if self.num_live_requests >= self.max_live_requests:
            raise self.too_many_requests()
        if self.num_queued_tokens and not self.has_room_for(1):
            raise self.too_many_tokens()
        self.num_live_requests += 1
        self.idle.clear()
        return Ticket(self)

    def leave(self, ticket: Ticket) -> None:
        self.num_live_requests -= ticket.num_requests
        if not self.num_live_requests:
            self.idle.set()

    def has_room_for(self, num_tokens: int) -> bool:
        return self.max_queued_tokens is None or self.num_queued_tokens + num_tokens <= self.max_queued_tokens

    def too_many_requests(self) -> ApiError:
        text = f"the server has {self.num_live_requests} live requests and takes at most {self.max_live_requests}"
        return ApiError(ErrorKind.OVERLOADED, f"{text}; try again later")

    def too_many_tokens(self) -> ApiError:
        text = f"{self.num_queued_tokens} prompt tokens wait and at most {self.max_queued_tokens} may"
        return ApiError(ErrorKind.OVERLOADED, f"{text}; try again later")
