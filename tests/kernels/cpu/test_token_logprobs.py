"""token_logprobs on the CPU: the bits of likeliest_tokens, close to the reference, and alone among any other rows."""

from __future__ import annotations

import math

import cpu_kernels
import pytest
import torch

from octavo.kernels.cpu.candidates import cpu_likeliest_tokens
from octavo.kernels.cpu.token_logprobs import cpu_token_logprobs
from octavo.kernels.ops.sampling import INVALID_TOKEN_ID
from octavo.kernels.ops.token_logprobs import token_logprobs

INF = math.inf
REFERENCE = token_logprobs.implementations["torch"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=generator(vocab_size)) * 3


@pytest.mark.parametrize("vocab_size", [1, 3, 256, 300, 9000, 49152])
def test_logprobs_are_close_to_the_references(each_isa, vocab_size: int) -> None:
    logits = make_logits(17, vocab_size)
    rows = torch.randint(17, (60,), generator=generator(0))
    token_ids = torch.randint(-1, vocab_size, (60,), generator=generator(1))
    got, expected = cpu_token_logprobs(logits, rows, token_ids), REFERENCE(logits, rows, token_ids)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize("vocab_size", [300, 20_000])
def test_they_have_the_bits_of_the_lists(each_isa, vocab_size: int) -> None:
    logits = make_logits(9, vocab_size)
    token_ids, listed = cpu_likeliest_tokens(logits, 20)
    got = cpu_token_logprobs(logits, torch.arange(9).repeat_interleave(20), token_ids.flatten())
    assert torch.equal(got, listed.flatten())


@pytest.mark.parametrize("vocab_size", [6, 20_000])
def test_no_token_and_no_distribution_have_no_logprob(each_isa, vocab_size: int) -> None:
    logits = torch.full((5, vocab_size), -INF)
    logits[0, 4], logits[0, 2] = 1.0, 2.0
    logits[1, 3] = math.nan
    logits[2, 3] = INF
    logits[4] = 0
    rows, token_ids = torch.tensor([0, 0, 0, 1, 2, 3, 4]), torch.tensor([2, 5, INVALID_TOKEN_ID, 0, 0, 0, 0])
    got = cpu_token_logprobs(logits, rows, token_ids)
    assert got.isnan().tolist() == [False, False, True, True, True, True, False]
    assert got[0].item() == pytest.approx(-0.3132617)
    assert got[1] == -INF
    assert got[6].item() == pytest.approx(-math.log(vocab_size))


def test_rows_are_independent(each_isa) -> None:
    all_rows = torch.arange(512)

    def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return cpu_token_logprobs(logits, all_rows[: len(token_ids)], token_ids)

    for num_rows, vocab_size, batch_sizes in ((512, 700, cpu_kernels.BATCH_SIZES), (10, 20_000, (3, 10))):
        token_ids = torch.randint(-1, vocab_size, (num_rows,), generator=generator(2))
        rows = [make_logits(num_rows, vocab_size), token_ids]
        cpu_kernels.assert_rows_are_independent(logprobs_of, rows, batch_sizes)
    cpu_kernels.assert_replays(logprobs_of, [make_logits(40, 700), token_ids.repeat(4) % 700], [1, 40, 11])


def test_a_token_does_not_depend_on_where_its_row_stands(each_isa) -> None:
    logits = make_logits(12, 9000)
    rows, token_ids = torch.randperm(12, generator=generator(3)), torch.arange(12)
    in_order = cpu_token_logprobs(logits, torch.arange(12), token_ids)
    assert torch.equal(cpu_token_logprobs(logits, rows, token_ids[rows]), in_order[rows])


@pytest.mark.parametrize(("row", "token_id"), [(3, 0), (-1, 0), (0, 40)])
def test_what_is_outside_of_the_logits_is_refused(each_isa, row: int, token_id: int) -> None:
    with pytest.raises(IndexError):
        cpu_token_logprobs(torch.zeros(3, 40), torch.tensor([1, row]), torch.tensor([0, token_id]))


def test_rows_and_tokens_that_are_not_pairs_are_refused(each_isa) -> None:
    with pytest.raises(ValueError, match="1 rows for 2 tokens"):
        cpu_token_logprobs(torch.zeros(3, 40), torch.tensor([1]), torch.tensor([0, 1]))


def test_no_tokens(each_isa) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert cpu_token_logprobs(torch.empty(0, 10), empty, empty).shape == (0,)
