"""The one way from a draft to output: admit, check, run, and give events or the whole; no HTTP and no API here.

Invariant: whatever ends a `Run` (its output, an error, a consumer that left), its requests are ended in the engine
core, so nothing runs there for nobody.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import NamedTuple

from octavo.api_server.admission import Admission, Ticket
from octavo.api_server.api_keys import Tenant
from octavo.api_server.engine_client import EngineClient
from octavo.api_server.errors import ApiError, ErrorKind
from octavo.api_server.generation.choices import Choices
from octavo.api_server.generation.gate import Gate
from octavo.api_server.generation.job import Counts, Draft, Job, OutputEvent, TokenEntry, WholeChoice
from octavo.api_server.generation.prompt_logs import PromptLogs


class Generator:
    """Everything that a run needs; one for each process that generates."""

    def __init__(self, gate: Gate, engine: EngineClient, admission: Admission, request_timeout_s: float) -> None:
        self.gate = gate
        self.engine = engine
        self.admission = admission
        self.request_timeout_s = request_timeout_s

    def admit(self) -> Ticket:
        """Take a place, before anything is read; leaving the ticket gives it back. Raises ApiError (429)."""
        return self.admission.enter()

    async def prepare(self, draft: Draft, ticket: Ticket, tenant: Tenant, arrival_time_s: float) -> Job:
        """Check `draft` and turn it into a job; raises ApiError, also when there is no room for so much."""
        ticket.grow(self.gate.check(draft))
        job = await self.gate.prepare(draft, arrival_time_s, tenant)
        ticket.queue(job.prompt_lengths)
        return job

    def run(self, job: Job, ticket: Ticket) -> Run:
        """Return a context manager in which `job` runs."""
        return Run(self, job, ticket)


class Timing(NamedTuple):
    """When a run came, and when its first choice had its first and its newest output, on the monotonic clock."""

    arrival_s: float
    first_output_s: float
    last_output_s: float


class Run:
    """One job on its way."""

    def __init__(self, generator: Generator, job: Job, ticket: Ticket) -> None:
        self.job = job
        self._timeout_s = generator.request_timeout_s
        self._generation = generator.engine.generate(
            job.requests, lambda index: ticket.start(index // job.num_requests_per_prompt)
        )
        tokenizer = generator.gate.tokenizer
        self._prompt_logs = PromptLogs(job, self._generation, tokenizer) if job.has_prompt_logprobs else None
        self._choices = Choices(job, self._generation, tokenizer, self._prompt_logs)
        self._deadline: asyncio.TimerHandle | None = None

    def __enter__(self) -> Run:
        self._generation.__enter__()
        text = f"the request took longer than {self._timeout_s:g} s"
        self._deadline = asyncio.get_running_loop().call_later(
            self._timeout_s, self._generation.fail, ApiError(ErrorKind.REQUEST_TIMEOUT, text)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._generation.__exit__(kind, value, traceback)

    @property
    def is_finished(self) -> bool:
        """Whether every choice has had its last event."""
        return self._choices.num_unfinished == 0

    def counts(self) -> Counts:
        """Return the tokens so far."""
        return self._choices.counts()

    def timing(self) -> Timing:
        """Return the times of the first choice; those of its output are 0 before there is any."""
        first = self._generation.live_requests[0]
        return Timing(first.request.arrival_time_s, first.first_output_s, first.last_output_s)

    def prompt_logprobs(self, prompt_index: int) -> list[TokenEntry]:
        """Return an entry for each token of a prompt, once a choice of it has an event; none if nobody asked."""
        return [] if self._prompt_logs is None else self._prompt_logs.entries[prompt_index]

    async def events(self) -> list[OutputEvent]:
        """Wait for output and return it; none after a wake-up, or while all text is held back. Raises ApiError."""
        updates = await self._generation.updates()
        if self._prompt_logs is not None:
            updates = await self._prompt_logs.release(updates)
        return self._choices.events(updates)

    async def collect(self) -> list[WholeChoice]:
        """Run to the end and return all choices. Raises ApiError."""
        events: list[list[OutputEvent]] = [[] for _ in range(self.job.num_choices)]
        while not self.is_finished:
            for event in await self.events():
                events[event.index].append(event)
        return [WholeChoice(index, each) for index, each in enumerate(events)]

    def wake(self) -> None:
        """Have `events` return soon, with nothing if nothing is new."""
        self._generation.wake()

    def fail(self, error: ApiError) -> None:
        """End the run with `error`, which is what the metrics count it as."""
        self._generation.fail(error)
