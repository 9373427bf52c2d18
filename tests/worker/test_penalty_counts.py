"""Counts of tokens on the device: a function of the tokens of each row, however they came."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_device import FakeGpu
from hypothesis import given, settings
from hypothesis import strategies as st
from logits_edits_cases import counts_of

from octavo.kernels.ops.sampling import INVALID_TOKEN_ID
from octavo.worker.cpu_device import CPU_DEVICE
from octavo.worker.penalty_counts import PenaltyCounts

NUM_ROWS, VOCAB_SIZE = 4, 11
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20)


def ids(token_ids: list[int]) -> np.ndarray:
    return np.array(token_ids, np.int64)


@given(requests=st.lists(st.tuples(st.integers(0, NUM_ROWS - 1), TOKENS, TOKENS, TOKENS), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_counts_are_those_of_the_rows_tokens_whether_assigned_or_drawn(requests):
    counts = PenaltyCounts(NUM_ROWS, VOCAB_SIZE, CPU_DEVICE)
    held = {}
    for row, prompt, output, drawn in requests:
        counts.assign(row, ids(prompt), ids(output))
        for token_id in drawn:
            counts.add(torch.tensor([row, -1]), torch.tensor([token_id, 0]))
        held[row] = (prompt, output + drawn)
    expected = counts_of(list(held.values()), VOCAB_SIZE)
    assert torch.equal(counts.counts[list(held)], expected)


def test_each_drawn_token_counts_in_its_own_row_and_failed_rows_count_nothing():
    counts = PenaltyCounts(NUM_ROWS, VOCAB_SIZE, CPU_DEVICE)
    for row in range(NUM_ROWS):
        counts.assign(row, ids([3]), ids([]))
    before = counts.counts.clone()
    counts.add(torch.tensor([2, -1, 0, 3]), torch.tensor([5, 5, 3, INVALID_TOKEN_ID]))
    changes = (counts.counts - before).nonzero().tolist()
    assert changes == [[0, 3], [2, 5]]


def test_memory_is_taken_when_the_first_row_asks():
    counts = PenaltyCounts(NUM_ROWS, VOCAB_SIZE, CPU_DEVICE)
    assert counts.counts is None
    counts.assign(1, ids([]), ids([]))
    assert counts.counts.shape == (NUM_ROWS, VOCAB_SIZE)
    assert counts.counts.dtype == torch.int32


@pytest.mark.parametrize(("prompt", "output"), [([VOCAB_SIZE], []), ([], [VOCAB_SIZE])])
def test_a_token_beyond_the_vocabulary_is_refused(prompt, output):
    with pytest.raises((IndexError, ValueError)):
        PenaltyCounts(NUM_ROWS, VOCAB_SIZE, CPU_DEVICE).assign(0, ids(prompt), ids(output))


def test_on_a_gpu_nothing_waits_and_rows_assigned_one_after_the_other_keep_their_own():
    with FakeGpu(3) as gpu:
        counts = PenaltyCounts(NUM_ROWS, VOCAB_SIZE, gpu)
        rows, token_ids = (gpu.make_uploader(4096).upload({"x": ids(x)})["x"] for x in ([0, -1, 2], [7, 7, 1]))
        gpu.synchronize()
        with gpu.no_waiting():
            counts.assign(0, ids([1, 2]), ids([7]))
            counts.assign(2, ids([9]), ids([]))
            counts.add(rows, token_ids)
            counts.add(rows, token_ids)
        expected = counts_of([([1, 2], [7, 7, 7]), ([9], [1, 1])], VOCAB_SIZE)
        on_host = gpu.download(counts.counts)
        gpu.synchronize()
        assert torch.equal(on_host[[0, 2]], expected)
