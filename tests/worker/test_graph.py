"""Which numbers of requests have a graph, how a step is padded to one, and which steps a graph can run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kernels.ops.attention import AttentionPlan, PlanCapacity
from octavo.worker.graph import GraphShape, StepGraph, StepGraphs, empty_plan, graph_sizes
from octavo.worker.input_batch import InputBatch


def batch_of(num_requests: int, num_tokens: int | None = None) -> InputBatch:
    num_tokens = num_tokens or num_requests
    return InputBatch(
        rows=np.arange(num_requests),
        num_scheduled_tokens=np.ones(num_requests, np.int64),
        token_ids=np.arange(num_tokens) + 50,
        positions=np.arange(num_tokens) + 9,
        slot_mapping=np.arange(num_tokens) + 70,
        query_start_loc=np.arange(num_requests + 1, dtype=np.int32),
        seq_lens=np.full(num_requests, 10, np.int32),
        block_tables=np.ones((num_requests, 3), np.int32),
        sampled_requests=np.arange(num_requests),
        sampled_tokens=np.arange(num_requests),
    )


def plan_of(num_work: int, num_reductions: int = 1, num_partials: int = 1, num_wide: int = 0) -> AttentionPlan:
    work, reductions = torch.ones(num_work, 4, dtype=torch.int32), torch.ones(num_reductions, 4, dtype=torch.int32)
    return AttentionPlan(work, reductions, num_partials, num_wide, 0)


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (100, [1, 2, 4, *range(8, 65, 8), 80, 96, 100]),
        (256, [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16)]),
        (9999, [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]),
    ],
)
def test_the_ladder_ends_with_the_largest_step(max_num_seqs, expected):
    assert graph_sizes(max_num_seqs) == expected


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 8, 9, 63, 64, 65, 200, 256, 257, 500, 512, 700])
def test_the_ladder_wastes_little(max_num_seqs):
    """Every step has a graph, and no more than a few rows of it, or a quarter, are padding."""
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    for num_requests in range(1, min(max_num_seqs, 512) + 1):
        size = min(size for size in sizes if size >= num_requests)
        assert size - num_requests <= max(7, num_requests // 4)


def test_padding_has_no_slot_no_work_and_a_length_that_can_be_read():
    shape = GraphShape(4, empty_plan(PlanCapacity(5, 2, 7)), torch.zeros(4, 8))
    batch = batch_of(3)
    arrays = shape.pad(batch, plan_of(3))
    assert arrays["token_ids"].tolist() == [50, 51, 52, 0]
    assert arrays["positions"].tolist() == [9, 10, 11, 0]
    assert arrays["slot_mapping"].tolist() == [70, 71, 72, -1]
    assert arrays["query_start_loc"].tolist() == [0, 1, 2, 3, 4]
    assert arrays["seq_lens"].tolist() == [10, 10, 10, 1]
    assert arrays["work"][:, 0].tolist() == [1, 1, 1, -1, -1]
    assert arrays["reductions"][:, 0].tolist() == [1, -1]
    assert arrays["block_tables"] is batch.block_tables
    assert list(arrays)[-1] == "block_tables", "the only array whose size the number of requests does not tell"


def graphs_of(capacity: PlanCapacity, *sizes: int) -> StepGraphs:
    tables = torch.zeros(8, 8, dtype=torch.int32)
    return StepGraphs([StepGraph(GraphShape(size, empty_plan(capacity), tables), None, tables) for size in sizes])


def size_of(graph: StepGraph | None) -> int | None:
    return graph and graph.shape.size


def test_a_step_takes_the_smallest_graph_that_holds_it():
    graphs = graphs_of(PlanCapacity(0, 0, 0), 1, 2, 4)
    assert [size_of(graphs.find(batch_of(num), None)) for num in range(1, 6)] == [1, 2, 4, 4, None]
    assert graphs.find(batch_of(2, num_tokens=3), None) is None


@pytest.mark.parametrize(
    ("plan", "is_held"),
    [
        (plan_of(5, 2, 7), True),
        (plan_of(6, 2, 7), False),
        (plan_of(5, 3, 7), False),
        (plan_of(5, 2, 8), False),
        (plan_of(5, 2, 7, num_wide=1), False),
        (None, False),
    ],
)
def test_a_plan_that_is_too_large_runs_without_a_graph(plan, is_held):
    graphs = graphs_of(PlanCapacity(5, 2, 7), 4)
    assert (graphs.find(batch_of(2), plan) is not None) is is_held
