"""The likeliest tokens against a plain sort by (logprob, token id)."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.kernels.ops.sampling import INVALID_TOKEN_ID

INF = math.inf
# Few different values, so that most rows have equals at the cut.
LOGITS = st.lists(st.sampled_from([-INF, -80.0, -1.0, 0.0, 0.5, 0.5, 2.0]), min_size=6, max_size=6)


def plain(row: torch.Tensor, num_tokens: int, masked: set[int]) -> list[tuple[int, float]]:
    logprobs = row.log_softmax(-1).tolist()
    possible = [
        (-value, token_id) for token_id, value in enumerate(logprobs) if value > -INF and token_id not in masked
    ]
    listed = [(token_id, -value) for value, token_id in sorted(possible)[:num_tokens]]
    num_missing = min(num_tokens, len(row)) - len(listed)
    return listed + [(INVALID_TOKEN_ID, -INF)] * num_missing


@given(
    rows=st.lists(LOGITS, min_size=1, max_size=4),
    num_tokens=st.integers(1, 8),
    pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=5),
)
@settings(max_examples=300, deadline=None)
def test_rows_equal_a_plain_sort(rows, num_tokens, pairs):
    logits = torch.tensor(rows)
    pairs = [(row, token_id) for row, token_id in pairs if row < len(rows)]
    masked = torch.tensor(pairs, dtype=torch.int64).t() if pairs else None
    token_ids, logprobs = likeliest_tokens(logits, num_tokens, masked)
    assert token_ids.dtype == torch.int64
    assert logprobs.dtype == torch.float32
    for index, row in enumerate(logits):
        got = list(zip(token_ids[index].tolist(), logprobs[index].tolist(), strict=True))
        if row.isneginf().all():
            assert got == [(INVALID_TOKEN_ID, -INF)] * min(num_tokens, 6)
        else:
            assert got == plain(row, num_tokens, {token_id for other, token_id in pairs if other == index})


@pytest.mark.parametrize("vocab_size", [7, 5003, 49152])
def test_logprobs_are_those_of_the_whole_row(vocab_size):
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1)) * 4
    token_ids, logprobs = likeliest_tokens(logits, 6)
    expected = logits.double().log_softmax(-1).topk(6)
    assert torch.equal(token_ids, expected.indices)
    torch.testing.assert_close(logprobs.double(), expected.values, atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_the_other_rows():
    logits = torch.randn(33, 5003, generator=torch.Generator().manual_seed(9)).mul_(8).round_().div_(4)
    together = likeliest_tokens(logits, 12)
    backwards = likeliest_tokens(logits.flip(0), 12)
    for got, reversed_got, *alone in zip(
        together, backwards, *(likeliest_tokens(row[None], 12) for row in logits), strict=True
    ):
        assert torch.equal(got, reversed_got.flip(0))
        assert torch.equal(got, torch.cat(alone))


@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [math.nan] * 3, [-INF] * 3, [0.0, INF, 1.0]], ids=str)
@pytest.mark.parametrize("masked", [None, torch.tensor([[1], [1]])], ids=["plain", "masked"])
def test_a_row_that_is_no_distribution_has_no_tokens(row, masked):
    logits = torch.tensor([[1.0, 0.0, 2.0], row, [3.0, 0.0, 0.0]])
    token_ids, logprobs = likeliest_tokens(logits, 3, masked)
    assert token_ids.tolist() == [[2, 0, 1], [INVALID_TOKEN_ID] * 3, [0, 1, 2]]
    assert logprobs[1].tolist() == [-INF] * 3


@pytest.mark.parametrize("rows", [[2], [4, 0, 4, 1], list(range(40, -1, -1))], ids=len)
def test_rows_may_be_chosen_in_any_order(rows):
    logits = torch.randn(41, 300, generator=torch.Generator().manual_seed(4))
    logits[1, 7] = math.nan
    everything = likeliest_tokens(logits, 5)
    masked = torch.tensor([[0], [int(everything[0][rows[0], 0])]])
    for got, expected in zip(likeliest_tokens(logits, 5, None, torch.tensor(rows)), everything, strict=True):
        assert torch.equal(got, expected[rows])
    token_ids, _ = likeliest_tokens(logits, 4, masked, torch.tensor(rows))
    assert torch.equal(token_ids[0], everything[0][rows[0], 1:])


def test_the_logits_are_left_alone():
    logits = torch.tensor([[1.0, 2.0], [math.nan, 0.0]])
    before = logits.clone()
    likeliest_tokens(logits, 1, torch.tensor([[0], [1]]))
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


def test_a_step_without_rows():
    for rows in (None, torch.empty(0, dtype=torch.int64)):
        token_ids, logprobs = likeliest_tokens(torch.empty(0, 10), 3, rows=rows)
        assert token_ids.shape == logprobs.shape == (0, 3)


def test_the_sizes_do_not_follow_from_the_numbers():
    """Otherwise a GPU would have to be waited for. Tensors without content have no numbers."""
    logits, masked = torch.empty(4, 50, device="meta"), torch.empty(2, 3, dtype=torch.int64, device="meta")
    token_ids, logprobs = likeliest_tokens(logits, 6, masked)
    assert token_ids.shape == logprobs.shape == (4, 6)


@pytest.mark.parametrize("rows", [None, torch.arange(127, -1, -1)], ids=["all", "chosen"])
def test_many_rows_take_little_more_memory_than_their_logprobs(rows):
    logits = torch.randn(128, 4096)
    with torch.profiler.profile(profile_memory=True) as profile:
        likeliest_tokens(logits, 4, rows=rows)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert logits.nbytes <= max(accumulate(changes)) < 2 * logits.nbytes
