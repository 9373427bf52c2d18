"""The handle on all workers: each step goes to every rank, its result comes from rank 0.

Invariant: nothing but a well-formed event under the name of a worker gets past here; all else is counted and dropped.
A worker that cannot take a step is lost, and with it the process: the KV of all requests is partly with that worker.
"""

from __future__ import annotations

import logging
import time

import msgspec

from octavo.engine_core.stats import FrameCounters
from octavo.protocol.agreement import Agreement, agreement_of, difference, missing_nodes
from octavo.protocol.codec import decode_worker_event, encode
from octavo.protocol.config import EngineConfig
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.protocol.transport import Listener, wait_readable
from octavo.protocol.worker_messages import (
    EngineHello,
    ModelRunnerOutput,
    SchedulerOutput,
    WorkerEvent,
    WorkerHello,
    WorkerReady,
)

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 0.5
SIGN_OF_LIFE = b""  # a frame that workers ignore: what counts is whether it can be sent


class WorkerLostError(StartupError):
    """A worker is gone or does not read."""


class WorkerExecutor:
    """The workers at the other end of `listener`, by the names `worker-<rank>`, spread evenly over the nodes.

    With several nodes it looks every `check_interval_s` whether all are still connected: only the deaths on this node
    are seen by the supervisor.
    """

    def __init__(self, listener: Listener, num_workers: int, num_nodes: int = 1) -> None:
        self.listener = listener
        self.ranks = {f"worker-{rank}".encode(): rank for rank in range(num_workers)}
        self.num_local_workers = num_workers // num_nodes
        self.check_interval_s = CHECK_INTERVAL_S if num_nodes > 1 else None
        self.frame_counters = FrameCounters()
        self._checked_s = 0.0

    def meet_all_nodes(self, config: EngineConfig) -> None:
        """Wait until every worker said hello, and tell all of them whether the start goes on.

        Raises StartupError when a node does not come in time, or was started for something else than this one.
        """
        verdict = self._wait_for_hellos(agreement_of(config), config.parallel.node_timeout_s)
        for name, rank in self.ranks.items():
            if not verdict.problem or self._node_of(rank) > 0:  # on this node the supervisor is told, below
                self.listener.send(name, encode(verdict))
        if verdict.problem:
            self.listener.close()  # which sends what is queued
            raise StartupError(ExitCode(verdict.exit_code), verdict.problem)

    def _wait_for_hellos(self, agreement: Agreement, limit_s: float) -> EngineHello:
        deadline_s, missing = time.monotonic() + limit_s, set(self.ranks.values())
        while missing:
            if (left_s := deadline_s - time.monotonic()) <= 0:
                nodes = sorted({self._node_of(rank) for rank in missing})
                return EngineHello(missing_nodes(nodes, sorted(missing), limit_s), ExitCode.NODE_LOST)
            wait_readable([self.listener], left_s)
            rank, event = self._receive_event()
            if rank is not None and isinstance(event, WorkerHello):
                missing.discard(rank)
                if problem := difference(agreement, event.agreement, self._node_of(rank)):
                    return EngineHello(problem, ExitCode.USAGE)
        return EngineHello()

    def wait_until_ready(self) -> list[WorkerReady]:
        """Wait for every worker, for ever if need be; return what they report, by rank."""
        ready: dict[int, WorkerReady] = {}
        while len(ready) < len(self.ranks):
            wait_readable([self.listener], self.check_interval_s)
            rank, event = self._receive_event()
            if isinstance(event, WorkerReady) and event.rank == rank:
                ready[rank] = event
            self.check()
        return [ready[rank] for rank in sorted(ready)]

    def check(self) -> None:
        """Now and then, with several nodes: raise WorkerLostError when a worker is not connected any more."""
        now_s = time.monotonic()
        if self.check_interval_s is not None and now_s - self._checked_s >= self.check_interval_s:
            self._checked_s = now_s
            self._send_to_all(SIGN_OF_LIFE)

    def execute(self, step: SchedulerOutput) -> None:
        """Send the step to every worker; raise WorkerLostError when one cannot take it."""
        self._send_to_all(encode(step))

    def _send_to_all(self, frame: bytes) -> None:
        for name, rank in self.ranks.items():
            if not self.listener.send(name, frame):
                raise self._loss_of(rank)

    def _loss_of(self, rank: int) -> WorkerLostError:
        node = self._node_of(rank)
        if node == 0:
            return WorkerLostError(ExitCode.PROCESS_DIED, f"worker {rank} is gone or takes no steps")
        text = f"node {node} is gone: its worker {rank} is not connected any more; see the log of that node"
        return WorkerLostError(ExitCode.NODE_LOST, text)

    def _node_of(self, rank: int) -> int:
        return rank // self.num_local_workers

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

    def _receive_event(self) -> tuple[int | None, WorkerEvent | None]:
        received = self.listener.receive()
        return (None, None) if received is None else self._decode(*received)

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
