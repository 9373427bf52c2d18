"""The real scheduler on a virtual clock.

The loop is the engine core's: take what has arrived, apply results, schedule while fewer steps are in flight than
allowed. A step starts when the device is free and the step has reached it. Scheduling takes no time of its own; what
the way from a result to the next step costs is one constant of the device, hidden when a step was sent ahead.
Invariant: time never goes back, and steps end in the order in which they were scheduled. When as many requests wait as
an API server would queue, the next ones are held back, as a client does that is told to come again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import NamedTuple

from octavo.api_server.client.shapes import Shape
from octavo.engine_core.scheduler import Scheduler
from octavo.protocol.config import ApiConfig
from octavo.protocol.engine_messages import AddRequest, EngineStats, FinishReason, RequestOutput
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import ModelRunnerOutput, WorkerReady
from octavo.simulator.measurements import Measurements, StepSample
from octavo.simulator.prompts import STOP_TOKEN_ID, private_token_id, prompt_token_ids
from octavo.simulator.settings import Setup
from octavo.simulator.worker import SimulatedWorker

MAX_WAITING_REQUESTS = ApiConfig().max_queued_requests


class StuckError(RuntimeError):
    """Requests are left, but nothing can happen any more, or one ended as it should not: a defect of the scheduler."""


class StepInFlight(NamedTuple):
    """When the step ends on the device, and its result."""

    end_s: float
    result: ModelRunnerOutput


def make_scheduler(setup: Setup) -> Scheduler:
    """The engine core's scheduler, with the pools and speeds that a worker would report."""
    num_tokens = setup.max_num_batched_tokens
    memory = WorkerReady(
        rank=0,
        num_device_blocks=setup.num_device_blocks,
        num_host_blocks=setup.settings.num_host_blocks,
        copied_blocks_per_s=setup.cost_model.copied_blocks_per_s(),
        prefill_tokens_per_s=setup.cost_model.prefill_tokens_per_s(num_tokens),
    )
    return Scheduler(setup.engine_config(), memory)


class Simulation:
    """One run; `run` once."""

    def __init__(self, setup: Setup, shapes: list[Shape]) -> None:
        self.setup = setup
        self.scheduler = make_scheduler(setup)
        self.worker = SimulatedWorker(setup.settings.block_size)
        self.measurements = Measurements(setup.num_device_blocks * setup.settings.block_size)
        self._shapes = shapes
        self._num_arrived = 0
        self._clock_s = 0.0
        self._device_free_at_s = 0.0
        self._in_flight: deque[StepInFlight] = deque()

    def run(self) -> EngineStats:
        """Go on until every request has ended; return the scheduler's own counts. Raises StuckError."""
        while self._num_arrived < len(self._shapes) or self.scheduler.requests:
            self._add_arrived()
            while self._may_schedule() and self._start_step():
                pass
            self._advance()
        return self.scheduler.stats()

    # Arrivals

    def _next_arrival_s(self) -> float | None:
        """When the next request comes in; None when there is none, or it is held back."""
        if self._num_arrived == len(self._shapes) or self._is_queue_full():
            return None
        return self._shapes[self._num_arrived].arrival_s

    def _is_queue_full(self) -> bool:
        return len(self.scheduler.requests) - len(self.scheduler.running) >= MAX_WAITING_REQUESTS

    def _num_held_back(self) -> int:
        """Requests that would have arrived by now."""
        num_due = bisect_right(self._shapes, self._clock_s, lo=self._num_arrived, key=lambda shape: shape.arrival_s)
        return num_due - self._num_arrived

    def _add_arrived(self) -> None:
        while (arrival_s := self._next_arrival_s()) is not None and arrival_s <= self._clock_s:
            self._add(self._shapes[self._num_arrived], self._num_arrived)
            self._num_arrived += 1

    def _add(self, shape: Shape, index: int) -> None:
        request_id = f"r{index}"
        params = SamplingParams(
            max_tokens=self.setup.max_tokens_of(shape.num_prompt_tokens),
            temperature=0.0,
            stop_token_ids=(STOP_TOKEN_ID,),
        )
        self.measurements.arrived(request_id, shape.arrival_s)
        self.worker.expect(request_id, shape.num_output_tokens, private_token_id(index))
        command = AddRequest(request_id, prompt_token_ids(shape, index), params, shape.arrival_s)
        output = self.scheduler.add(command)
        if output is not None:
            raise StuckError(f"{request_id} was refused: {output.error_message}")

    # Steps

    def _may_schedule(self) -> bool:
        return len(self._in_flight) < self.setup.settings.max_steps_in_flight

    def _start_step(self) -> bool:
        """Schedule a step and work out when it ends; False when there is nothing to compute now."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        load, result = self.worker.execute(step, self.scheduler.steps_in_flight[-1].sampling)
        duration_s = self.setup.cost_model.step_s(load)
        start_s = max(self._clock_s + self.setup.cost_model.host_s, self._device_free_at_s)
        self._device_free_at_s = start_s + duration_s
        self._in_flight.append(StepInFlight(self._device_free_at_s, result))
        self._measure(duration_s)
        return True

    def _measure(self, duration_s: float) -> None:
        stats, worker = self.scheduler.stats(), self.worker
        num_allocated_slots = stats.num_used_blocks * self.setup.settings.block_size
        num_unused_slots = worker.num_slots - worker.num_computed_tokens  # shared blocks are full, so they cancel out
        self.measurements.add_step(
            StepSample(
                end_s=self._device_free_at_s,
                duration_s=duration_s,
                num_running=stats.num_running_requests,
                num_waiting=stats.num_waiting_requests + self._num_held_back(),
                num_token_slots=num_allocated_slots - num_unused_slots,
                num_reserved_slots=worker.num_reserved_slots,
                num_internal_slots=num_unused_slots - worker.num_reserved_slots,
                num_allocated_slots=num_allocated_slots,
            )
        )

    # Time

    def _advance(self) -> None:
        """Go to the next event: an arrival that can still get into a step, or the end of the oldest step."""
        arrival_s = self._next_arrival_s()
        if self._in_flight:
            end_s, result = self._in_flight[0]
            if arrival_s is None or arrival_s >= end_s or not self._may_schedule():
                self._in_flight.popleft()
                self._clock_s = end_s
                self._apply(self.scheduler.update(result))
                return
        if arrival_s is None:
            raise StuckError(f"{len(self.scheduler.requests)} requests are left, and nothing is scheduled any more")
        self._clock_s = arrival_s

    def _apply(self, outputs: list[RequestOutput]) -> None:
        measurements, clock_s = self.measurements, self._clock_s
        for output in outputs:
            measurements.got_token(output.request_id, clock_s)
            if output.finish_reason is not None:
                self._finish(output)

    def _finish(self, output: RequestOutput) -> None:
        num_output_tokens = output.first_index + len(output.token_ids)
        if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise StuckError(f"{output.request_id} ended with {output.finish_reason}: {output.error_message}")
        if num_output_tokens != self._shapes[int(output.request_id[1:])].num_output_tokens:
            raise StuckError(f"{output.request_id} ended after {num_output_tokens} tokens")
        self.worker.forget(output.request_id)
        self.measurements.finished(output.request_id, num_output_tokens)
