"""sample_tokens on the CPU: against a full sort in float64, against the reference, and alone among any other rows."""

from __future__ import annotations

import functools
import math

import cpu_kernels
import pytest
import torch
from sampling_checks import distance_to_step, kept_tokens

from octavo.kernels.cpu.sampling import cpu_sample_tokens
from octavo.kernels.ops.sampling import INVALID_TOKEN_ID, sample_tokens

INF = math.inf
REFERENCE = sample_tokens.implementations["torch"]
OPTIONS = [  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.3, 0, 1.0, 0.0),
    (2.5, 0, 1.0, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.0, 40, 1.0, 0.0),
    (1.0, 300, 1.0, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 0.01, 0.0),
    (2.5, 0, 0.999, 0.0),
    (1.0, 2000, 0.95, 0.02),
]


def full(num_rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[torch.Tensor, ...]:
    return (
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p, dtype=torch.float64),
        torch.full((num_rows,), min_p),
    )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_uniforms(num_rows: int, seed: int = 0) -> torch.Tensor:
    uniforms = torch.rand(num_rows, generator=generator(seed), dtype=torch.float64)
    uniforms[: min(2, num_rows)] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)[:num_rows]
    return uniforms


@pytest.mark.parametrize("num_tokens", [1, 5, 256, 257, 700, 9000])
@pytest.mark.parametrize("num_levels", [0, 3], ids=["", "many equals"])
def test_draws_agree_with_a_full_sort(each_isa, num_tokens: int, num_levels: int) -> None:
    uniforms = make_uniforms(20)
    for index, options in enumerate(OPTIONS[1:]):
        row = torch.randn(num_tokens, generator=generator(index)) * 2
        row = (row * num_levels).round() / num_levels if num_levels else row
        tokens = cpu_sample_tokens(row.expand(20, -1), *full(20, *options), uniforms).tolist()
        temperature, top_k, top_p, min_p = options
        # fp32 weights may fall on the other side of top_p, by one token
        expected = [kept_tokens(row, temperature, top_k, top_p * factor, min_p) for factor in (1 - 1e-6, 1 + 1e-6)]
        for token, uniform in zip(tokens, uniforms.tolist(), strict=True):
            errors = [distance_to_step(each, token, uniform) for each in expected if each[token] > 0]
            assert errors
            assert min(errors) < 1e-6


@functools.cache
def cases_of_reference(spread: float) -> list[tuple[tuple[float, int, float, float], list[torch.Tensor], torch.Tensor]]:
    """Options, the arguments of many rows with them, and the reference's tokens."""
    cases = []
    for seed, options in enumerate(OPTIONS):
        logits = torch.randn(160, 8500, generator=generator(seed)) * spread
        given = [logits, *full(160, *options), make_uniforms(160, seed)]
        cases.append((options, given, REFERENCE(*given)))
    return cases


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_the_token_is_the_references_unless_the_random_number_is_at_a_step(each_isa, spread: float) -> None:
    num_different = 0
    for options, given, expected in cases_of_reference(spread):
        got = cpu_sample_tokens(*given)
        different = (got != expected).nonzero()[:, 0].tolist()
        num_different += len(different)
        for row in different:
            probabilities, uniform = kept_tokens(given[0][row], *options), given[-1][row].item()
            assert (probabilities.cumsum(0) - uniform).abs().min() < 1e-6, options
            assert distance_to_step(probabilities, int(got[row]), uniform) < 1e-6
    assert num_different <= 10  # of 1,920


def test_equals_go_to_the_lowest_id(each_isa) -> None:
    logits = torch.zeros(4, 50_000)
    logits[1, [40_000, 33, 20_000]] = 5.0
    logits[2, -1] = 1.0
    logits[3, :] = -INF
    logits[3, [7, 9]] = -80.0
    greedy = (torch.zeros(4), None, None, None, torch.zeros(4).double())
    assert cpu_sample_tokens(logits, *greedy).tolist() == [0, 33, 49_999, 7]
    likeliest = full(4, 1.0, 1, 1.0, 0.0)
    assert cpu_sample_tokens(logits, *likeliest, torch.full((4,), 0.999).double()).tolist() == [0, 33, 49_999, 7]


@pytest.mark.parametrize("top_k", [3, 70, 1500, 2000])
def test_top_k_keeps_the_lowest_of_equals(each_isa, top_k: int) -> None:
    """Token 1 is the likeliest, 1,999 are equal: whether by a few candidates or by the digits of many."""
    logits = torch.ones(3000, 2000)
    logits[:, 1] = 3.0
    uniforms = torch.arange(3000).double() / 3000
    drawn = cpu_sample_tokens(logits, torch.ones(3000), torch.full((3000,), top_k), None, None, uniforms)
    assert drawn.max() == top_k - 1
    assert len(drawn.unique()) > 0.6 * top_k


def test_min_p_keeps_a_token_that_is_just_as_likely_as_it_says(each_isa) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    uniforms = torch.arange(100).double() / 100
    drawn = cpu_sample_tokens(logits.expand(100, -1), torch.ones(100), None, None, torch.ones(100), uniforms)
    assert set(drawn.tolist()) == {1, 3}


@pytest.mark.parametrize("num_tokens", [3, 20_000])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_row_that_is_no_distribution_fails_alone(each_isa, num_tokens, temperature, top_k) -> None:
    faults = [
        [0.0, math.nan, 1.0],
        [-INF] * 3,
        [0.0, INF, 1.0],
        [INF] * 3,
        [math.nan, INF, -INF],
        [-INF, -INF, math.nan],
    ]
    for fault in faults:
        logits = torch.full((3, num_tokens), -INF)
        logits[0, 0], logits[2, -1] = 1.0, 1.0
        logits[1, -3:] = torch.tensor(fault)
        got = cpu_sample_tokens(logits, *full(3, temperature, top_k, 1.0, 0.0), torch.full((3,), 0.5).double())
        assert got.tolist() == [0, INVALID_TOKEN_ID, num_tokens - 1]


def mixed_rows(num_rows: int, num_tokens: int) -> list[torch.Tensor]:
    """Rows of all options, side by side."""
    options = [OPTIONS[row % len(OPTIONS)] for row in range(num_rows)]
    dtypes = (torch.float32, torch.int64, torch.float64, torch.float32)
    columns = [
        torch.tensor(column, dtype=dtype) for column, dtype in zip(zip(*options, strict=True), dtypes, strict=True)
    ]
    logits = torch.randn(num_rows, num_tokens, generator=generator(9)) * 2
    logits[5, 17] = math.nan
    return [logits, *columns, make_uniforms(num_rows)]


def test_rows_are_independent(each_isa) -> None:
    cpu_kernels.assert_rows_are_independent(cpu_sample_tokens, mixed_rows(512, 700))
    cpu_kernels.assert_rows_are_independent(cpu_sample_tokens, mixed_rows(24, 20_000), [2, 7])


def test_recorded_sampling_is_replayed_on_fewer_rows(executor) -> None:
    cpu_kernels.assert_replays(cpu_sample_tokens, mixed_rows(36, 700), [1, 36, 12, 2])


def test_options_that_nobody_asks_for_may_be_left_out(each_isa) -> None:
    logits = torch.randn(50, 900, generator=generator(1))
    uniforms = make_uniforms(50)
    left_out = cpu_sample_tokens(logits, torch.ones(50), None, None, None, uniforms)
    assert torch.equal(left_out, cpu_sample_tokens(logits, *full(50, 1.0, 0, 1.0, 0.0), uniforms))


def test_a_step_without_rows(each_isa) -> None:
    assert cpu_sample_tokens(torch.empty(0, 100), *full(0, 1.0, 5, 1.0, 0.0), make_uniforms(0)).tolist() == []


def test_options_of_another_dtype_are_refused(each_isa) -> None:
    with pytest.raises(TypeError, match=r"torch\.int32 where torch\.int64"):
        cpu_sample_tokens(torch.zeros(1, 9), torch.ones(1), torch.ones(1).int(), None, None, torch.zeros(1).double())
