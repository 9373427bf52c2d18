"""A worker that computes nothing: it keeps count of what each row holds, and samples the stop token when it is time.

It reads the same messages as a real worker. Only it knows how long the outputs are going to be. Totals are kept up to
date by what a step changes; a steady request is not touched while it is steady, except to sample its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.protocol.worker_messages import CopyKind, ModelRunnerOutput, NewRequest, SchedulerOutput
from octavo.simulator.cost_model import StepLoad, attention_pairs
from octavo.simulator.prompts import STOP_TOKEN_ID


class HasRequestId(Protocol):
    """All that the worker needs of the scheduler's requests."""

    @property
    def request_id(self) -> str: ...


class Row:
    """One request on the device.

    Attributes:
        num_slots: token slots in its block table.
        num_computed_tokens: tokens with KV; for a steady row, those when it joined minus the steps run until then.
        num_known_tokens: tokens that it came with; its slots up to there are about to be filled.
    """

    __slots__ = ("num_computed_tokens", "num_known_tokens", "num_slots")

    def __init__(self, request: NewRequest, block_size: int) -> None:
        self.num_slots = len(request.block_ids) * block_size
        self.num_computed_tokens = request.num_computed_tokens
        self.num_known_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)

    def num_reserved_slots(self) -> int:
        """Slots for known tokens that are not computed yet."""
        return max(0, min(self.num_known_tokens, self.num_slots) - self.num_computed_tokens)


class SimulatedWorker:
    """Executes steps in order.

    Attributes:
        num_slots, num_computed_tokens, num_reserved_slots: totals over all rows after the last step; blocks that are
            shared count for each row.
    """

    def __init__(self, block_size: int) -> None:
        self.num_slots = 0
        self.num_computed_tokens = 0
        self.num_reserved_slots = 0
        self._block_size = block_size
        self._rows: dict[str, Row] = {}
        self._steady: set[str] = set()  # never iterated
        self._num_steady_tokens = 0  # computed tokens of all steady rows
        self._num_steps = 0
        self._scripts: dict[str, list[int]] = {}  # request_id -> [output tokens to come, the token that it samples]

    def expect(self, request_id: str, num_output_tokens: int, token_id: int) -> None:
        """Have the request sample `token_id` until the last of its output tokens, the stop token."""
        self._scripts[request_id] = [num_output_tokens, token_id]

    def forget(self, request_id: str) -> None:
        """The request has ended, and no later step holds it."""
        del self._scripts[request_id]

    def execute(self, step: SchedulerOutput, sampling: Sequence[HasRequestId]) -> tuple[StepLoad, ModelRunnerOutput]:
        """Run one step; `sampling` are the requests whose next token it samples, in batch order."""
        self._apply_deltas(step)
        load = self._compute(step, len(sampling))
        return load, ModelRunnerOutput(step.step_id, [self._sample(request.request_id) for request in sampling])

    def _apply_deltas(self, step: SchedulerOutput) -> None:
        for request_id in step.dropped_request_ids:
            self._drop(request_id)
        for new in step.new_requests:
            self._drop(new.request_id)
            row = self._rows[new.request_id] = Row(new, self._block_size)
            self._count(row, 1)
        for cached in step.cached_requests:
            self._grow(cached.request_id, len(cached.new_block_ids) * self._block_size)
        for request_id in step.steady_left:
            self._leave(request_id)
        for request_id in step.steady_joined:
            self._join(request_id)

    def _compute(self, step: SchedulerOutput, num_sampled_tokens: int) -> StepLoad:
        num_tokens = len(self._steady)
        self._num_steps += 1
        self.num_computed_tokens += num_tokens
        self._num_steady_tokens += num_tokens
        num_kv_tokens = num_pairs = self._num_steady_tokens
        for request_id, num_new_tokens in step.num_scheduled_tokens.items():
            row = self._rows[request_id]
            num_pairs += attention_pairs(row.num_computed_tokens, num_new_tokens)
            self._count(row, -1)
            row.num_computed_tokens += num_new_tokens
            self._count(row, 1)
            num_kv_tokens += row.num_computed_tokens
            num_tokens += num_new_tokens
        num_device_copies = sum(kind == CopyKind.DEVICE for kind, _, _ in step.copies)
        return StepLoad(
            num_tokens,
            num_sampled_tokens,
            num_kv_tokens,
            num_pairs,
            num_link_copies=len(step.copies) - num_device_copies,
            num_device_copies=num_device_copies,
        )

    def _sample(self, request_id: str) -> int:
        script = self._scripts[request_id]
        script[0] -= 1
        return script[1] if script[0] else STOP_TOKEN_ID

    # Rows

    def _count(self, row: Row, sign: int) -> None:
        self.num_slots += sign * row.num_slots
        self.num_computed_tokens += sign * row.num_computed_tokens
        self.num_reserved_slots += sign * row.num_reserved_slots()

    def _drop(self, request_id: str) -> None:
        if request_id in self._rows:
            self._leave(request_id)
            self._count(self._rows.pop(request_id), -1)

    def _grow(self, request_id: str, num_slots: int) -> None:
        row = self._rows[request_id]
        if request_id in self._steady:  # nothing is reserved, and its number of computed tokens has another meaning
            row.num_slots += num_slots
            self.num_slots += num_slots
        else:
            self._count(row, -1)
            row.num_slots += num_slots
            self._count(row, 1)

    def _join(self, request_id: str) -> None:
        row = self._rows[request_id]
        self._steady.add(request_id)
        self.num_reserved_slots -= row.num_reserved_slots()
        self._num_steady_tokens += row.num_computed_tokens
        row.num_computed_tokens -= self._num_steps

    def _leave(self, request_id: str) -> None:
        if request_id in self._steady:
            row = self._rows[request_id]
            self._steady.remove(request_id)
            row.num_computed_tokens += self._num_steps
            self._num_steady_tokens -= row.num_computed_tokens
            self.num_reserved_slots += row.num_reserved_slots()
