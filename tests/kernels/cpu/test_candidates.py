"""likeliest_tokens on the CPU against the reference, and alone among any other rows."""

from __future__ import annotations

import math

import cpu_kernels
import pytest
import torch

from octavo.kernels.cpu.candidates import cpu_likeliest_tokens
from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.kernels.ops.sampling import INVALID_TOKEN_ID

INF = math.inf
REFERENCE = likeliest_tokens.implementations["torch"]


def assert_equals_reference(logits: torch.Tensor, num_tokens: int, masked: torch.Tensor | None = None) -> None:
    token_ids, logprobs = cpu_likeliest_tokens(logits, num_tokens, masked)
    expected_ids, expected_logprobs = REFERENCE(logits, num_tokens, masked)
    assert torch.equal(token_ids, expected_ids)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_vocabulary", [1, 3, 256, 300, 9000])
@pytest.mark.parametrize("num_tokens", [1, 8, 40, 400])
def test_lists_equal_the_references(each_isa, num_vocabulary: int, num_tokens: int) -> None:
    logits = torch.randn(17, num_vocabulary, generator=torch.Generator().manual_seed(num_tokens)) * 3
    assert_equals_reference(logits, num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 5000])
def test_equals_are_listed_by_token_id(each_isa, num_tokens: int) -> None:
    logits = (torch.randn(20, 3000, generator=torch.Generator().manual_seed(0)) * 2).round()
    logits[0] = 0
    assert_equals_reference(logits, num_tokens)


def test_logits_with_equal_logprobs_are_equals(each_isa) -> None:
    """Both differences round to the same logprob, so the lower id is first, though its logit is smaller."""
    logits = torch.full((1, 600), -INF)
    logits[0, 0] = 40.0
    logits[0, 3], logits[0, 500] = 1e-7, 2e-7
    assert_equals_reference(logits, 3)
    assert cpu_likeliest_tokens(logits, 3)[0].tolist() == [[0, 3, 500]]
    assert cpu_likeliest_tokens(logits, 2)[0].tolist() == [[0, 3]]


def test_masked_tokens_are_not_listed(each_isa) -> None:
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(1))
    best = logits.argsort(-1, descending=True)
    pairs = [(row, int(best[row, rank])) for row in (0, 2, 5) for rank in range(0, 30, 2)] * 2
    masked = torch.tensor(pairs).t().contiguous()
    for num_tokens in (1, 10, 2000):
        assert_equals_reference(logits, num_tokens, masked)


@pytest.mark.parametrize("num_vocabulary", [6, 20_000])
def test_rows_with_few_tokens_and_rows_that_are_no_distribution(each_isa, num_vocabulary: int) -> None:
    logits = torch.full((5, num_vocabulary), -INF)
    logits[0, 4], logits[0, 2] = 1.0, 2.0
    logits[1, 3] = math.nan
    logits[2, 3] = INF
    logits[4] = torch.arange(num_vocabulary).float()
    token_ids, logprobs = cpu_likeliest_tokens(logits, 3)
    assert token_ids[0].tolist() == [2, 4, INVALID_TOKEN_ID]
    assert logprobs[0].tolist() == [pytest.approx(-0.3132617), pytest.approx(-1.3132617), -INF]
    assert token_ids[1:4].eq(INVALID_TOKEN_ID).all()
    assert logprobs[1:4].eq(-INF).all()
    assert token_ids[4].tolist() == [num_vocabulary - 1, num_vocabulary - 2, num_vocabulary - 3]


def test_rows_may_be_chosen_in_any_order(each_isa) -> None:
    logits = torch.randn(11, 9000, generator=torch.Generator().manual_seed(4))
    logits[3, 7] = math.nan
    everything = cpu_likeliest_tokens(logits, 5)
    masked = torch.tensor([[1], [int(everything[0][0, 0])]])
    for rows in ([2], [4, 0, 4, 3, 10]):
        cpu_kernels.assert_same_bits(
            cpu_likeliest_tokens(logits, 5, None, torch.tensor(rows)), [each[rows] for each in everything]
        )
    token_ids, _ = cpu_likeliest_tokens(logits, 4, masked, torch.tensor([4, 0, 4]))
    assert torch.equal(token_ids, torch.stack([everything[0][4, :4], everything[0][0, 1:], everything[0][4, :4]]))


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_that_there_are_not_are_refused(each_isa, row: int) -> None:
    with pytest.raises(IndexError):
        cpu_likeliest_tokens(torch.zeros(3, 40), 2, None, torch.tensor([0, row]))


def test_rows_are_independent(each_isa) -> None:
    def list_seven(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cpu_likeliest_tokens(logits, 7)

    rows = torch.randn(512, 700, generator=torch.Generator().manual_seed(2)) * 2
    cpu_kernels.assert_rows_are_independent(list_seven, [rows])
    long_rows = torch.randn(10, 20_000, generator=torch.Generator().manual_seed(3)) * 2
    cpu_kernels.assert_rows_are_independent(list_seven, [long_rows], [3, 10])
    cpu_kernels.assert_replays(list_seven, [rows[:40]], [1, 40, 11])
