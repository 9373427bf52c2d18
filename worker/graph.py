"""Captured forward passes of steps in which every request computes one token (CUDA graphs).

Starting the operations of a decode step one by one costs the host more than they take on a GPU. A graph starts all of
them at once, but has its shapes and addresses fixed. So there is one for each of some numbers of requests, and a step
is padded up to the next: a padding request has no work in the attention's plan, slot -1, which writes no KV, and a
length of 1, so that also without a plan it only reads. Inputs are where the uploader puts the arrays of such a step;
block tables, whose width changes from step to step, are copied from there to a place of their own.

All graphs share one pool of memory, the largest is captured first, so that the others fit into what it took. A step
whose attention needs more work than the graph was captured for (requests that share most of their blocks can) runs
without one. Rejected: graphs of prefill (what they save is little beside the work), a graph for every number of
requests (time of the start and memory), sampling inside (see `model_runner`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from octavo.kernels.ops.attention import AttentionPlan, PlanCapacity
from octavo.worker.device import Device, Graph, Uploader
from octavo.worker.input_batch import InputBatch
from octavo.worker.step_inputs import forward_arrays

MAX_GRAPH_REQUESTS = 512
NO_SLOT = -1
STEPS_UP_TO = ((8, 64), (16, 256), (32, MAX_GRAPH_REQUESTS))  # (distance of the numbers, up to)

NOBODY = InputBatch(
    *(np.zeros(0, np.int64) for _ in range(5)),
    query_start_loc=np.zeros(1, np.int32),
    seq_lens=np.zeros(0, np.int32),
    block_tables=np.zeros((0, 1), np.int32),
    sampled_requests=np.zeros(0, np.int64),
    sampled_tokens=np.zeros(0, np.int64),
)

Forward = Callable[[dict[str, torch.Tensor], AttentionPlan | None], torch.Tensor]
"""Runs the model on the uploaded arrays of a step and its plan: -> [T, hidden_size]."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of requests that have a graph, ascending; the last is the most that a step may have."""
    sizes = [1, 2, 4, 8]
    for distance, last in STEPS_UP_TO:
        sizes += range(sizes[-1] + distance, last + 1, distance)
    largest = min(max_num_seqs, MAX_GRAPH_REQUESTS)
    return [size for size in sizes if size < largest] + [largest]


def _pad(array: np.ndarray, num_rows: int, value: int) -> np.ndarray:
    """Return `array` with rows of `value` behind it up to `num_rows`."""
    padded = np.full((num_rows, *array.shape[1:]), value, array.dtype)
    padded[: len(array)] = array
    return padded


def empty_plan(capacity: PlanCapacity) -> AttentionPlan | None:
    """Return the plan of a decode step in which nobody has work, None for kernels that need none."""
    if capacity.num_work == 0:
        return None
    work, reductions = (
        torch.full((num_rows, 4), -1, dtype=torch.int32) for num_rows in (capacity.num_work, capacity.num_reductions)
    )
    return AttentionPlan(work, reductions, capacity.num_partials, num_wide_work=0, num_wide_reductions=0)


class GraphShape(NamedTuple):
    """What the steps of one graph have in common.

    Attributes:
        size: requests, padding among them.
        plan: the largest plan; None for kernels that need none.
        block_tables: int32 [size, max_blocks], what the graph reads.
    """

    size: int
    plan: AttentionPlan | None
    block_tables: torch.Tensor

    def holds(self, plan: AttentionPlan | None) -> bool:
        """Return whether `plan` is no larger than what was captured."""
        if plan is None or self.plan is None:
            return plan is self.plan
        return (
            plan.num_wide_work == 0
            and len(plan.work) <= len(self.plan.work)
            and len(plan.reductions) <= len(self.plan.reductions)
            and plan.num_partials <= self.plan.num_partials
        )

    def pad(self, batch: InputBatch, plan: AttentionPlan | None) -> dict[str, np.ndarray]:
        """Return the arrays of a step of `size` requests, of which the first are `batch`; tables stay as they are."""
        padded = batch._replace(
            token_ids=_pad(batch.token_ids, self.size, 0),
            positions=_pad(batch.positions, self.size, 0),
            slot_mapping=_pad(batch.slot_mapping, self.size, NO_SLOT),
            query_start_loc=np.arange(self.size + 1, dtype=np.int32),
            seq_lens=_pad(batch.seq_lens, self.size, 1),
        )
        arrays = forward_arrays(padded, plan)
        if self.plan is not None:
            arrays["work"] = _pad(arrays["work"], len(self.plan.work), -1)
            arrays["reductions"] = _pad(arrays["reductions"], len(self.plan.reductions), -1)
        return arrays


class StepGraph(NamedTuple):
    """The graph of steps of up to `shape.size` requests, and where it leaves its result, [size, hidden_size]."""

    shape: GraphShape
    graph: Graph
    hidden: torch.Tensor

    def arrays(self, batch: InputBatch, plan: AttentionPlan | None) -> dict[str, np.ndarray]:
        """Return the arrays of a step, padded."""
        return self.shape.pad(batch, plan)

    def run(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Replay on uploaded `arrays`; return [size, hidden_size], of which the first rows are the step's."""
        num_requests, num_blocks = tensors["block_tables"].shape
        self.shape.block_tables[:num_requests, :num_blocks].copy_(tensors["block_tables"])
        self.graph.replay()
        return self.hidden


def capture_graph(device: Device, uploader: Uploader, forward: Forward, shape: GraphShape) -> StepGraph:
    """Run the step of padding alone once, so that everything is compiled and loaded, then record it."""
    arrays = shape.pad(NOBODY, shape.plan)
    tensors, again = uploader.upload(arrays), uploader.upload(arrays)
    if any(tensors[name] is not again[name] for name in arrays):
        raise RuntimeError(f"a graph of {shape.size} requests needs more inputs than the uploader has room for")
    tensors["block_tables"] = shape.block_tables
    forward(tensors, shape.plan)
    device.synchronize()
    graph, hidden = device.capture(lambda: forward(tensors, shape.plan))
    return StepGraph(shape, graph, hidden)


class StepGraphs:
    """Graphs by number of requests."""

    def __init__(self, graphs: Sequence[StepGraph]) -> None:
        """`graphs` ascend in size."""
        self.graphs = list(graphs)
        self.sizes = [graph.shape.size for graph in graphs]

    def find(self, batch: InputBatch, plan: AttentionPlan | None) -> StepGraph | None:
        """Return the smallest graph that runs the step, None when it has to run without one."""
        num_requests = len(batch.rows)
        index = bisect_left(self.sizes, num_requests)
        if index == len(self.sizes) or len(batch.token_ids) != num_requests:
            return None
        return self.graphs[index] if self.graphs[index].shape.holds(plan) else None


NO_GRAPHS = StepGraphs([])


@torch.inference_mode()
def capture_graphs(
    device: Device,
    uploader: Uploader,
    forward: Forward,
    sizes: Sequence[int],
    max_blocks: int,
    capacity_of: Callable[[int], PlanCapacity],
) -> StepGraphs:
    """Capture a graph for each of `sizes`, which ascend.

    Args:
        uploader: of the steps that will use the graphs.
        forward: computes a step; see `Forward`.
        max_blocks: the longest block table of a request.
        capacity_of: number of requests -> how large the plan of such a step can be.
    """
    block_tables = torch.zeros((sizes[-1], max_blocks), dtype=torch.int32, device=device.torch_device)
    shapes = [GraphShape(size, empty_plan(capacity_of(size)), block_tables[:size]) for size in reversed(sizes)]
    graphs = [capture_graph(device, uploader, forward, shape) for shape in shapes]
    return StepGraphs(graphs[::-1])
