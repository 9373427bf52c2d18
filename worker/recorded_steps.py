"""Steps of a CPU as one recorded list of kernels: what a captured graph is to a GPU.

Calling some ten kernels a layer from Python costs about as much as a small model's step. The kernels of
`octavo.kernels.cpu` can be recorded with their arguments and replayed from C; a recorded list computes any number of
tokens up to the one that it was recorded with. So there is one list for all steps, of prompts as well, nothing is
padded, and what a list computes has the bits of the same kernels called one by one. Inputs are copied to places of
their own. A step that is larger than the list, or whose attention needs more work than there is room for, is computed
kernel by kernel.

A group of ranks talks between the layers, which no kernel does; its steps are not recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from octavo.kernels.cpu.execution import EXECUTOR, CannotRecordError, CommandList
from octavo.kernels.ops.attention import AttentionPlan, PlanCapacity
from octavo.worker.graph import NO_GRAPHS, Forward, empty_plan
from octavo.worker.input_batch import InputBatch
from octavo.worker.step_inputs import forward_arrays

UNKNOWN_FROM = -1  # a token that was sampled by the step before is -1 - row


class StepSizes(NamedTuple):
    """The most that a recorded step may have."""

    num_tokens: int
    num_requests: int
    max_blocks: int
    plan: PlanCapacity


def _with_room_for_the_end(capacity: PlanCapacity) -> PlanCapacity:
    """A row of -1 ends a plan."""
    return capacity._replace(num_work=capacity.num_work + 1, num_reductions=capacity.num_reductions + 1)


def _make_inputs(sizes: StepSizes, plan: AttentionPlan | None) -> dict[str, torch.Tensor]:
    """Return zeros at the places that the list reads, by the names of `forward_arrays`."""
    shapes = {
        "token_ids": ((sizes.num_tokens,), torch.int64),
        "positions": ((sizes.num_tokens,), torch.int64),
        "slot_mapping": ((sizes.num_tokens,), torch.int64),
        "query_start_loc": ((sizes.num_requests + 1,), torch.int32),
        "seq_lens": ((sizes.num_requests,), torch.int32),
        "block_tables": ((sizes.num_requests, sizes.max_blocks), torch.int32),
    }
    inputs = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    return inputs if plan is None else inputs | {"work": plan.work, "reductions": plan.reductions}


class RecordedStep:
    """The list, as a graph of any step that fits."""

    def __init__(
        self,
        commands: CommandList,
        inputs: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        last_token_ids: torch.Tensor,
    ) -> None:
        """`hidden` is where the list leaves its result; `last_token_ids` int64 [num_rows], each row's last token."""
        self.commands = commands
        self.inputs = {name: tensor.numpy() for name, tensor in inputs.items()}
        self.hidden = hidden
        self.last_token_ids = last_token_ids.numpy()

    def arrays(self, batch: InputBatch, plan: AttentionPlan | None) -> dict[str, np.ndarray]:
        """Return the arrays of a step."""
        return forward_arrays(batch, plan)

    def run(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Replay on the arrays of a step; return [T, hidden_size], which lasts until the next replay."""
        for name, place in self.inputs.items():
            array = tensors[name].numpy()
            if name == "block_tables":
                place[: len(array), : array.shape[1]] = array
            else:
                place[: len(array)] = array
            if name in ("work", "reductions"):
                place[len(array)] = -1
        num_tokens = len(tensors["token_ids"])
        self._put_in_unknown_tokens(self.inputs["token_ids"][:num_tokens])
        self.commands.replay(num_tokens)
        return self.hidden[:num_tokens]

    def _put_in_unknown_tokens(self, token_ids: np.ndarray) -> None:
        is_unknown = token_ids <= UNKNOWN_FROM
        if is_unknown.any():
            token_ids[is_unknown] = self.last_token_ids[UNKNOWN_FROM - token_ids[is_unknown]]


class RecordedSteps:
    """Finds the list for a step."""

    def __init__(self, step: RecordedStep, sizes: StepSizes) -> None:
        self.step = step
        self.most = sizes
        self.sizes = [sizes.num_tokens]

    def find(self, batch: InputBatch, plan: AttentionPlan | None) -> RecordedStep | None:
        """Return the list, None for a step that has to run without one."""
        most = self.most
        fits = (
            len(batch.token_ids) <= most.num_tokens
            and len(batch.rows) <= most.num_requests
            and batch.block_tables.shape[1] <= most.max_blocks
        )
        if plan is not None:
            fits = fits and (
                len(plan.work) <= most.plan.num_work
                and len(plan.reductions) <= most.plan.num_reductions
                and plan.num_partials <= most.plan.num_partials
            )
        return self.step if fits else None


@torch.inference_mode()
def record_steps(forward: Forward, sizes: StepSizes, last_token_ids: torch.Tensor) -> tuple[RecordedSteps, str]:
    """Record the forward pass of a step.

    Args:
        forward: computes a step whose tokens are all known; see `graph.Forward`.
        last_token_ids: int64 [num_rows], on the CPU.

    Returns:
        What finds the list (NO_GRAPHS when the model has an operation that is no kernel of ours), and what to say.
    """
    plan = empty_plan(_with_room_for_the_end(sizes.plan)) if sizes.plan.num_work else None
    inputs = _make_inputs(sizes, plan)
    try:
        with EXECUTOR.record(sizes.num_tokens) as commands:
            hidden = forward(inputs, plan)
    except CannotRecordError as problem:
        return NO_GRAPHS, f"steps are not recorded: {problem}"
    step = RecordedStep(commands, inputs, hidden, last_token_ids)
    return RecordedSteps(step, sizes), f"a list of {len(commands)} kernels for steps of up to {sizes.num_tokens} tokens"
