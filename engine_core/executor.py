"""The handle on all workers: each step goes to every rank, its result comes from rank 0.

Invariant: nothing but a well-formed event under the name of a worker gets past here; all else is counted and dropped.
A worker that cannot take a step is lost, and with it the process: the KV of all requests is partly with that worker.
"""

from __future__ import annotations

import logging

import msgspec

from octavo.engine_core.stats import FrameCounters
from octavo.protocol.codec import decode_worker_event, encode
from octavo.protocol.transport import Listener, wait_readable
from octavo.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput, WorkerEvent, WorkerReady

logger = logging.getLogger(__name__)


class WorkerLostError(RuntimeError):
    """A worker is gone or does not read."""


class WorkerExecutor:
    """The workers at the other end of `listener`, by the names `worker-<rank>`."""

    def __init__(self, listener: Listener, num_workers: int) -> None:
        self.listener = listener
        self.ranks = {f"worker-{rank}".encode(): rank for rank in range(num_workers)}
        self.frame_counters = FrameCounters()

    def wait_until_ready(self) -> list[WorkerReady]:
        """Wait for every worker, for ever if need be; return what they report, by rank."""
        ready: dict[int, WorkerReady] = {}
        while len(ready) < len(self.ranks):
            wait_readable([self.listener], timeout_s=None)
            received = self.listener.receive()
            if received is None:
                continue
            rank, event = self._decode(*received)
            if isinstance(event, WorkerReady) and event.rank == rank:
                ready[rank] = event
        return [ready[rank] for rank in sorted(ready)]

    def execute(self, step: SchedulerOutput) -> None:
        """Send the step to every worker; raise WorkerLostError when one cannot take it."""
        frame = encode(step)
        for name in self.ranks:
            if not self.listener.send(name, frame):
                raise WorkerLostError(f"{name.decode()} cannot take step {step.step_id}")

    def receive_result(self) -> ModelRunnerOutput | None:
        """The next result that is here; None when there is none."""
        while (received := self.listener.receive()) is not None:
            rank, event = self._decode(*received)
            if rank == 0 and isinstance(event, ModelRunnerOutput):
                return event
        return None

    def count_bad_frame(self, reason: str) -> None:
        """Count a frame that is dropped, and log it unless there are many."""
        if self.frame_counters.count_bad_frame():
            logger.warning("dropped a worker's frame (%d so far): %s", self.frame_counters.num_bad_frames, reason)

    def _decode(self, name: bytes, frame: bytes) -> tuple[int | None, WorkerEvent | None]:
        rank = self.ranks.get(name)
        if rank is None:
            self.count_bad_frame(f"no worker is called {name!r}")
            return None, None
        try:
            return rank, decode_worker_event(frame)
        except (msgspec.MsgspecError, RecursionError) as problem:
            self.count_bad_frame(str(problem))
            return rank, None
