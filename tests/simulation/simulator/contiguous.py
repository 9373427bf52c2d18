"""Servers without paging: each request gets one contiguous piece of KV memory for its whole life.

These are the baselines of the PagedAttention paper (Kwon et al., SOSP 2023, §6): Orca with the maximum length, with the
next power of two, and with an oracle. Ours assume what it assumes: first come first served, a whole prompt in one
step, the buddy system, no preemption (the piece is always enough), and each step waits for the result of the last one.
Static batching is the same with one difference: nobody joins or leaves until the longest output of the batch has
ended, and rows that have ended are still computed, as padding.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from octavo.api_server.client.shapes import Shape
from octavo.simulator.allocators import Allocator, BuddyAllocator, FirstFitAllocator, next_power_of_two
from octavo.simulator.cost_model import StepLoad, attention_pairs
from octavo.simulator.measurements import Measurements, StepSample
from octavo.simulator.settings import Allocation, Batching, Reservation, Setup


def num_reserved_slots(reservation: Reservation, shape: Shape, max_model_len: int) -> int:
    """Slots that the request gets at its admission."""
    if reservation is Reservation.MAX:
        return max_model_len
    if reservation is Reservation.POW2:
        num_output_tokens = next_power_of_two(shape.num_output_tokens)
        return min(shape.num_prompt_tokens + num_output_tokens, max_model_len)
    return shape.num_prompt_tokens + shape.num_output_tokens


class Job(NamedTuple):
    """An admitted request, first to end first."""

    last_step: int  # the step that gives its last token
    request_index: int
    address: int
    num_asked_slots: int
    num_allocated_slots: int


class ContiguousSimulation:
    """One run; `run` once."""

    def __init__(self, setup: Setup, shapes: list[Shape]) -> None:
        num_slots = setup.num_device_blocks * setup.settings.block_size
        is_buddy = setup.settings.allocation is Allocation.BUDDY
        self.setup = setup
        self.measurements = Measurements(num_slots)
        self._allocator: Allocator = BuddyAllocator(num_slots) if is_buddy else FirstFitAllocator(num_slots)
        self._is_static = setup.settings.batching is Batching.STATIC
        self._shapes = shapes
        self._num_arrived = 0
        self._num_admitted = 0
        self._clock_s = 0.0
        self._num_steps = 0
        self._running: list[Job] = []  # a heap
        self._ended: list[Job] = []  # of a static batch that still runs
        self._num_token_slots = 0  # of running requests

    def run(self) -> None:
        """Go on until every request has ended. Raises ValueError when one can never be admitted."""
        while self._num_admitted < len(self._shapes) or self._running:
            self._take_arrived()
            admitted = self._admit()
            if self._running:
                self._step(admitted)
            elif self._num_arrived < len(self._shapes):
                self._clock_s = self._shapes[self._num_arrived].arrival_s
            else:
                raise ValueError("a request is longer than the largest piece: lower --max-model-len")

    def _take_arrived(self) -> None:
        while self._num_arrived < len(self._shapes) and self._shapes[self._num_arrived].arrival_s <= self._clock_s:
            self.measurements.arrived(f"r{self._num_arrived}", self._shapes[self._num_arrived].arrival_s)
            self._num_arrived += 1

    def _admit(self) -> list[Shape]:
        """Admit who fits, in order; they compute their prompts in the step that comes."""
        first = self._num_admitted
        if self._is_static and self._running:
            return []
        while self._num_admitted < self._num_arrived and len(self._running) < self.setup.settings.max_num_seqs:
            shape = self._shapes[self._num_admitted]
            num_slots = num_reserved_slots(self.setup.settings.reservation, shape, self.setup.max_model_len)
            address = self._allocator.allocate(num_slots)
            if address is None:
                break
            is_buddy = self.setup.settings.allocation is Allocation.BUDDY
            num_allocated = next_power_of_two(num_slots) if is_buddy else num_slots
            last_step = self._num_steps + shape.num_output_tokens
            heapq.heappush(self._running, Job(last_step, self._num_admitted, address, num_slots, num_allocated))
            self._num_admitted += 1
        return self._shapes[first : self._num_admitted]

    def _step(self, admitted: list[Shape]) -> None:
        load = self._load(admitted)
        duration_s = self.setup.cost_model.step_s(load)
        self._num_steps += 1
        self._clock_s += self.setup.cost_model.host_s + duration_s
        self._measure(duration_s)
        for job in self._running:
            self.measurements.got_token(f"r{job.request_index}", self._clock_s)
        while self._running and self._running[0].last_step == self._num_steps:
            self._end(heapq.heappop(self._running))
        if not self._running:
            self._release_ended()

    def _load(self, admitted: list[Shape]) -> StepLoad:
        """What the step computes: the new prompts, and one token for each other row."""
        num_prompt_tokens = sum(shape.num_prompt_tokens for shape in admitted)
        num_others = len(self._running) - len(admitted) + len(self._ended)
        num_padded_tokens = sum(self._num_kv_tokens(job) for job in self._ended)
        num_other_kv_tokens = self._num_token_slots + num_others + num_padded_tokens
        num_pairs = sum(attention_pairs(0, shape.num_prompt_tokens) for shape in admitted)
        self._num_token_slots += num_prompt_tokens + len(self._running) - len(admitted)
        return StepLoad(
            num_tokens=num_prompt_tokens + num_others,
            num_sampled_tokens=len(admitted) + num_others,
            num_kv_tokens=num_prompt_tokens + num_other_kv_tokens,
            num_attention_pairs=num_pairs + num_other_kv_tokens,
        )

    def _num_kv_tokens(self, job: Job) -> int:
        """Tokens with KV when the job's last token came out, which itself has none."""
        shape = self._shapes[job.request_index]
        return shape.num_prompt_tokens + shape.num_output_tokens - 1

    def _measure(self, duration_s: float) -> None:
        live = self._running
        num_allocated = sum(job.num_allocated_slots for job in live) + sum(j.num_allocated_slots for j in self._ended)
        num_asked = sum(job.num_asked_slots for job in live) + sum(job.num_asked_slots for job in self._ended)
        num_final = sum(self._num_kv_tokens(job) for job in live)
        self.measurements.add_step(
            StepSample(
                end_s=self._clock_s,
                duration_s=duration_s,
                num_running=len(live),
                num_waiting=self._num_arrived - self._num_admitted,
                num_token_slots=self._num_token_slots,
                num_reserved_slots=num_final - self._num_token_slots,
                num_internal_slots=num_asked - num_final,
                num_allocated_slots=num_allocated,
            )
        )

    def _end(self, job: Job) -> None:
        self.measurements.finished(f"r{job.request_index}", self._shapes[job.request_index].num_output_tokens)
        self._num_token_slots -= self._num_kv_tokens(job)
        self._ended.append(job)
        if not self._is_static:
            self._release_ended()

    def _release_ended(self) -> None:
        for job in self._ended:
            self._allocator.free(job.address)
        self._ended.clear()
