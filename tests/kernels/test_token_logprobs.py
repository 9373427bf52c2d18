"""Logprobs of given tokens against float64, and against what `likeliest_tokens` lists."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch

from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.kernels.ops.sampling import INVALID_TOKEN_ID
from octavo.kernels.ops.token_logprobs import token_logprobs

INF = math.inf


def make_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 4


@pytest.mark.parametrize("vocab_size", [7, 5003, 49152])
def test_they_are_those_of_the_whole_row(vocab_size):
    logits = make_logits(5, vocab_size)
    rows, token_ids = torch.tensor([4, 0, 0, 2]), torch.tensor([0, 6, vocab_size - 1, 3])
    expected = logits.double().log_softmax(-1)[rows, token_ids]
    logprobs = token_logprobs(logits, rows, token_ids)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 16, 40])
def test_they_have_the_bits_of_the_lists(num_tokens):
    logits = make_logits(33, 5003)
    rows = torch.randperm(33, generator=torch.Generator().manual_seed(2))
    token_ids, listed = likeliest_tokens(logits, num_tokens, rows=rows)
    got = token_logprobs(logits, rows.repeat_interleave(num_tokens), token_ids.flatten())
    assert torch.equal(got, listed.flatten())


def test_no_token_and_no_distribution_have_no_logprob():
    logits = torch.tensor([[0.0, -INF, 0.0], [0.0, math.nan, 1.0], [-INF] * 3, [0.0, INF, 1.0]])
    rows, token_ids = torch.tensor([0, 0, 1, 2, 3, 0]), torch.tensor([INVALID_TOKEN_ID, 1, 0, 0, 0, 2])
    got = token_logprobs(logits, rows, token_ids)
    assert got.isnan().tolist() == [True, False, True, True, True, False]
    assert got[1] == -INF
    assert got[5].item() == pytest.approx(-math.log(2))


def test_no_tokens():
    empty = torch.empty(0, dtype=torch.int64)
    assert token_logprobs(torch.empty(0, 10), empty, empty).shape == (0,)


def test_many_rows_take_a_part_of_the_memory_of_their_logits():
    logits = torch.randn(128, 4096)
    with torch.profiler.profile(profile_memory=True) as profile:
        token_logprobs(logits, torch.arange(128), torch.zeros(128, dtype=torch.int64))
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert 0 < max(accumulate(changes)) < logits.nbytes / 2
