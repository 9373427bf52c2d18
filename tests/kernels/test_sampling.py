"""sample_tokens against a reference in float64 that sorts every row; distributions; independence of the rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_checks import distance_to_step, kept_tokens

from octavo.kernels.ops import sampling
from octavo.kernels.ops.sampling import INVALID_TOKEN_ID, sample_tokens

INF = math.inf


def draw(
    logits: torch.Tensor,
    uniforms: list[float] | torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> list[int]:
    """Sample every row with the same options; None leaves the option out."""
    num_rows = len(logits)

    def full(value: float | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if value is None else torch.full((num_rows,), value, dtype=dtype)

    return sample_tokens(
        logits,
        full(temperature, torch.float32),
        full(top_k, torch.int64),
        full(top_p, torch.float64),
        full(min_p, torch.float32),
        torch.as_tensor(uniforms, dtype=torch.float64),
    ).tolist()


@settings(max_examples=150, deadline=None)
@given(
    num_tokens=st.integers(1, 700),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    num_levels=st.sampled_from([0, 3]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 40, 300, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 10_000),
)
def test_filters_agree_with_a_full_sort(
    num_tokens: int,
    spread: float,
    num_levels: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    """With num_levels, most logits are equal to others, so that ties decide."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(num_tokens, generator=generator) * spread
    if num_levels:
        row = (row * num_levels).round() / num_levels
    uniforms = torch.rand(20, generator=generator, dtype=torch.float64)
    uniforms[0], uniforms[1] = 0.0, 1 - 2**-53
    # fp32 weights may fall on the other side of top_p, by one token
    expected = [kept_tokens(row, temperature, top_k, top_p * factor, min_p) for factor in (1 - 1e-6, 1 + 1e-6)]

    tokens = draw(row.expand(20, -1), uniforms, temperature, top_k, top_p, min_p)

    for token, uniform in zip(tokens, uniforms.tolist(), strict=True):
        errors = [distance_to_step(each, token, uniform) for each in expected if each[token] > 0]
        assert errors
        assert min(errors) < 1e-6


@pytest.mark.parametrize("num_tokens", [600, 5000])
@pytest.mark.parametrize(("top_k", "top_p"), [(300, 1.0), (0, 0.95), (400, 0.9)])
def test_flat_rows_need_more_candidates(
    num_tokens: int, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly equal weights: NUM_CANDIDATES of them are not enough, and more of them give the exact answer."""
    row = torch.randn(num_tokens, generator=torch.Generator().manual_seed(3)) * 0.01
    uniforms = torch.rand(200, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    attempts = []
    select = sampling._zero_least_likely
    monkeypatch.setattr(sampling, "_zero_least_likely", lambda *args: attempts.append(args[-1]) or select(*args))

    tokens = draw(row.expand(200, -1), uniforms, 1.0, top_k, top_p)

    expected = kept_tokens(row, 1.0, top_k, top_p, 0.0)
    assert len(attempts) > 1
    assert expected.count_nonzero() > sampling.NUM_CANDIDATES
    assert all(expected[token] > 0 for token in tokens)
    errors = [distance_to_step(expected, token, u) for token, u in zip(tokens, uniforms.tolist(), strict=True)]
    assert max(errors) < 1e-6


def test_rows_that_ask_for_no_selection_do_not_pay_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows = []
    monkeypatch.setattr(torch.Tensor, "topk", lambda weights, *args, **kwargs: sorted_rows.append(len(weights)))
    monkeypatch.setattr(torch.Tensor, "sort", lambda *args, **kwargs: pytest.fail("sorted"))
    logits = torch.randn(3, 1000)
    draw(logits, [0.1, 0.5, 0.9], temperature=0.0, top_k=5)
    draw(logits, [0.1, 0.5, 0.9], min_p=0.1)
    draw(logits, [0.1, 0.5, 0.9], top_k=0, top_p=1.0)
    assert sum(sorted_rows) == 0


def chi_square(tokens: list[int], expected: torch.Tensor) -> float:
    kept = expected > 0
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    assert counts[~kept].sum() == 0
    means = expected[kept] * len(tokens)
    return ((counts[kept] - means) ** 2 / means).sum().item()


@pytest.mark.parametrize(
    ("options", "num_kept"),
    [((0.7, 0, 1.0, 0.0), 12), ((1.5, 5, 1.0, 0.0), 5), ((1.0, 0, 0.8, 0.0), None), ((1.0, 0, 1.0, 0.1), None)],
)
def test_draws_have_the_distribution(options: tuple[float, int, float, float], num_kept: int | None) -> None:
    """Chi-square of 20,000 draws, at most 11 degrees of freedom: beyond 31.3 in one of a thousand other seeds."""
    row = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 1.5
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    expected = kept_tokens(row, *options)
    assert num_kept in (None, expected.count_nonzero())
    assert chi_square(draw(row.expand(20_000, -1), uniforms, *options), expected) < 31.3


def test_draws_over_several_segments_have_the_distribution() -> None:
    """1000 tokens in 4 segments, 999 degrees of freedom: beyond 1143 in one of a thousand other seeds."""
    row = torch.randn(1000, generator=torch.Generator().manual_seed(7)) * 0.5
    uniforms = torch.rand(50_000, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    tokens = [token for part in uniforms.split(5000) for token in draw(row.expand(5000, -1), part)]
    assert chi_square(tokens, kept_tokens(row, 1.0, 0, 1.0, 0.0)) < 1143


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(40, 5003, generator=generator)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 3.0]).repeat(10)
    top_ks = torch.tensor([0, 0, 3, 0, 1000]).repeat(8)
    top_ps = torch.tensor([1.0, 0.9], dtype=torch.float64).repeat(20)
    min_ps = torch.tensor([0.0, 0.0, 0.02, 0.0]).repeat(10)
    uniforms = torch.rand(40, generator=generator, dtype=torch.float64)
    options = (temperatures, top_ks, top_ps, min_ps, uniforms)
    together = sample_tokens(logits, *options)

    alone = [sample_tokens(logits[row : row + 1], *(each[row : row + 1] for each in options)) for row in range(40)]
    backwards = sample_tokens(logits.flip(0), *(each.flip(0) for each in options)).flip(0)

    assert torch.equal(torch.cat(alone), together)
    assert torch.equal(backwards, together)


def test_options_that_nobody_asks_for_may_be_left_out() -> None:
    logits = torch.randn(50, 900, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert draw(logits, uniforms) == draw(logits, uniforms, top_k=0, top_p=1.0, min_p=0.0)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(4, 50_000)
    logits[1, [40_000, 33, 20_000]] = 5.0
    logits[2, -1] = 1.0
    logits[3, :] = -INF
    logits[3, [7, 9]] = -80.0
    assert draw(logits, [0.9] * 4, temperature=0.0) == [0, 33, 49_999, 7]


def test_top_k_one_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert draw(logits, [0.999], top_k=1) == [1]


def test_top_k_keeps_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 1.0, 1.0, 1.0]])
    uniforms = torch.arange(1000).double() / 1000
    assert set(draw(logits.expand(1000, -1), uniforms, top_k=3)) == {1, 2, 3}


def test_min_p_keeps_a_token_that_is_just_as_likely_as_it_says() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    uniforms = torch.arange(100).double() / 100
    assert set(draw(logits.expand(100, -1), uniforms, min_p=1.0)) == {1, 3}


def test_the_extreme_random_numbers_give_the_first_and_the_last_kept_token() -> None:
    logits = torch.full((2, 1000), -INF)
    logits[:, 300:700] = torch.randn(400, generator=torch.Generator().manual_seed(1))
    assert draw(logits, [0.0, 1 - 2**-53]) == [300, 699]


@pytest.mark.parametrize(
    "row",
    [[0.0, math.nan, 1.0], [math.nan] * 3, [-INF] * 3, [0.0, INF, 1.0], [INF] * 3, [math.nan, INF, -INF]],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [None, 2])
def test_a_row_that_is_no_distribution_fails_alone(row: list[float], temperature: float, top_k: int | None) -> None:
    logits = torch.tensor([[1.0, -INF, -INF], row, [-INF, -INF, 1.0]])
    assert draw(logits, [0.5] * 3, temperature, top_k) == [0, INVALID_TOKEN_ID, 2]


def test_a_step_without_rows() -> None:
    assert draw(torch.empty(0, 100), [], top_k=5) == []
