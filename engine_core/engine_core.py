"""Add, abort, step: the scheduler, the workers behind it, and whose request is whose.

It keeps `max_steps_in_flight` steps with the workers, so that they never wait for a decision, and collects outputs by
the API server that asked. Invariant: an output goes to the owner of its request, once, in order. It has no sockets:
`server` drives it in production, tests drive it in process.
"""

from __future__ import annotations

from typing import Protocol

from octavo.engine_core.scheduler import Scheduler
from octavo.protocol.config import EngineConfig
from octavo.protocol.engine_messages import AbortRequests, AddRequest, EngineStats, RequestOutput
from octavo.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput, WorkerReady


class Executor(Protocol):
    """A handle on all workers."""

    def execute(self, step: SchedulerOutput) -> None:
        """Have every worker run the step after those before it; does not wait."""
        ...


class EngineCore:
    """Requests of all API servers, one scheduler, one executor."""

    def __init__(self, config: EngineConfig, executor: Executor, memory: WorkerReady) -> None:
        """`memory` is what all workers have in common."""
        self.scheduler = Scheduler(config, memory)
        self.executor = executor
        self.max_steps_in_flight = config.scheduler.max_steps_in_flight
        self.owners: dict[str, bytes] = {}  # request_id -> name of the API server
        self._outputs: dict[bytes, list[RequestOutput]] = {}

    def add(self, owner: bytes, command: AddRequest) -> None:
        """Take a request for `owner`; the id of a live request is ignored."""
        if command.request_id in self.owners:
            return
        self.owners[command.request_id] = owner
        output = self.scheduler.add(command)
        if output is not None:
            self._collect([output])

    def abort(self, command: AbortRequests) -> None:
        """Forget these requests; ids that are not live are ignored."""
        self.scheduler.abort(command.request_ids)
        for request_id in command.request_ids:
            self.owners.pop(request_id, None)

    def abort_all_of(self, owner: bytes) -> None:
        """Forget everything that `owner` asked for: it cannot take its outputs any more."""
        self._outputs.pop(owner, None)
        self.abort(AbortRequests([request_id for request_id, name in self.owners.items() if name == owner]))

    def step(self) -> None:
        """Schedule as many steps as may be in flight, and hand them to the workers."""
        while len(self.scheduler.steps_in_flight) < self.max_steps_in_flight:
            step = self.scheduler.schedule()
            if step is None:
                return
            self.executor.execute(step)

    def update(self, result: ModelRunnerOutput) -> None:
        """Apply a result; raise UnexpectedResultError when it is not that of the oldest step in flight."""
        self._collect(self.scheduler.update(result))

    def take_outputs(self) -> dict[bytes, list[RequestOutput]]:
        """What is new since the last call, by owner."""
        outputs, self._outputs = self._outputs, {}
        return outputs

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def check_idle(self) -> None:
        """Raise InvariantError when no step is in flight and something is left over all the same."""
        self.scheduler.check_idle()

    def _collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            owner = self.owners[output.request_id]
            self._outputs.setdefault(owner, []).append(output)
            if output.finish_reason is not None:
                del self.owners[output.request_id]
