"""sample_tokens on a GPU: token for token the reference, the exact distribution, and rows that fail or stand alone."""

import math

import pytest
import torch
import triton
import triton_interpreter
from dense_inputs import DEVICE, among_poison, random_input, random_uniforms

from octavo.kernels.ops.sampling import INVALID_TOKEN_ID, sample_tokens
from octavo.kernels.triton import sampling
from octavo.kernels.triton.sampling import triton_sample_tokens

# numpy warns where a GPU computes infinity without a word
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
INF = math.inf
needs_interpreter = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counts what is loaded")
ROUNDING = 1e-6  # weights of another exponential move the boundaries between tokens by less than this


def options(
    num_rows: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> list[torch.Tensor | None]:
    """The same options for every row; None leaves the option out."""
    dtypes = (torch.float32, torch.int64, torch.float64, torch.float32)
    return [
        None if value is None else torch.full((num_rows,), value, dtype=dtype, device=DEVICE)
        for value, dtype in zip((temperature, top_k, top_p, min_p), dtypes, strict=True)
    ]


def draw(logits: torch.Tensor, uniforms: list[float] | torch.Tensor, *values: float | None) -> list[int]:
    uniforms = torch.as_tensor(uniforms, dtype=torch.float64).to(DEVICE)
    return triton_sample_tokens(logits.to(DEVICE), *options(len(logits), *values), uniforms).tolist()


def random_options(num_rows: int, vocab_size: int, seed: int) -> list[torch.Tensor]:
    """Every option set or not, in all combinations, for different rows."""
    generator = torch.Generator().manual_seed(seed)

    def choose(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (num_rows,), generator=generator)]

    return [
        choose([0.0, 0.3, 0.7, 1.0, 1.0, 1.6], torch.float32).to(DEVICE),
        choose([0, 0, 1, 2, 5, 40, 300, vocab_size, vocab_size + 9], torch.int64).to(DEVICE),
        choose([1.0, 1.0, 0.999, 0.9, 0.5, 0.05, 1e-9], torch.float64).to(DEVICE),
        choose([0.0, 0.0, 0.01, 0.1, 0.9], torch.float32).to(DEVICE),
    ]


def assert_tokens_of_reference(logits: torch.Tensor, values: list[torch.Tensor | None], uniforms: torch.Tensor) -> None:
    """Equal but where the reference itself gives another token if a boundary moves by a rounding."""
    tokens = triton_sample_tokens(logits, *values, uniforms)
    expected = sample_tokens(logits, *values, uniforms)
    temperatures, top_ks, top_ps, min_ps = values
    for row in (tokens != expected).nonzero()[:, 0].tolist():
        nearby = set()
        for moved_uniform in (-ROUNDING, 0.0, ROUNDING):
            for moved_p in (-ROUNDING, 0.0, ROUNDING):
                moved_top_ps = None if top_ps is None else (top_ps[[row]] * (1 + moved_p)).clamp(max=1.0)
                rest = [None if each is None else each[[row]] for each in (top_ks, min_ps)]
                moved = (uniforms[[row]] + moved_uniform).clamp(0, 1 - 2**-53)
                nearby.add(
                    sample_tokens(logits[[row]], temperatures[[row]], rest[0], moved_top_ps, rest[1], moved).item()
                )
        assert tokens[row].item() in nearby, f"row {row}: {tokens[row]}, not {expected[row]}"
    assert (tokens == expected).double().mean() >= 0.98


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(1, 2), (7, 24), (32, 16), (1000, 24), (5000, 10)])
@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_the_tokens_of_the_reference(vocab_size: int, num_rows: int, spread: float) -> None:
    logits = random_input(num_rows, vocab_size, seed=vocab_size) * spread
    values = random_options(num_rows, vocab_size, seed=vocab_size + 1)
    assert_tokens_of_reference(logits, values, random_uniforms(num_rows, seed=vocab_size + 2))


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_the_tokens_of_the_reference_over_many_blocks(block_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few different logits, so that what is kept is decided among equals, in several blocks."""
    monkeypatch.setattr(sampling, "BLOCK_TOKENS", block_tokens)
    logits = (random_input(10, 71, seed=3) * 2).round() / 2
    values = random_options(10, 71, seed=4)
    assert_tokens_of_reference(logits, values, random_uniforms(10, seed=5))


@pytest.mark.parametrize("left_out", [(1, 2, 3), (1,), (2,), (3,)], ids=str)
def test_options_that_nobody_asks_for_may_be_left_out(left_out: tuple[int, ...]) -> None:
    logits, uniforms = random_input(12, 60), random_uniforms(12)
    values = random_options(12, 60, seed=1)
    neutral = [None, 0, 1.0, 0.0]
    with_neutral = [torch.full_like(each, neutral[i]) if i in left_out else each for i, each in enumerate(values)]
    without = [None if i in left_out else each for i, each in enumerate(values)]
    assert torch.equal(
        triton_sample_tokens(logits, *without, uniforms), triton_sample_tokens(logits, *with_neutral, uniforms)
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.7, None, None, None),
        (1.5, 5, None, None),
        (1.0, None, 0.8, None),
        (1.0, None, None, 0.1),
        (0.9, 9, 0.9, 0.01),
    ],
)
def test_draws_have_the_distribution(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    """A token's interval of random numbers is as long as its probability, in id order; both ends are probed."""
    row = random_input(12, seed=5).cpu() * 1.5
    weights = torch.exp((row.double() - row.double().max()) / temperature)
    weights[weights < (min_p or 0)] = 0
    order = weights.argsort(descending=True)
    weights[order[top_k or 12 :]] = 0
    before = weights[order].cumsum(0) - weights[order]
    weights[order[before >= (top_p or 1) * weights.sum()]] = 0
    ends = weights.cumsum(0) / weights.sum()
    kept = weights.nonzero()[:, 0]
    probes = torch.stack((ends - weights / weights.sum() + ROUNDING, ends - ROUNDING), 1)[kept]

    tokens = draw(row.expand(2 * len(kept), -1), probes.flatten(), temperature, top_k, top_p, min_p)

    assert 1 < len(kept) <= 12
    assert tokens == kept.repeat_interleave(2).tolist()


def test_a_row_does_not_depend_on_the_other_rows_or_on_what_lies_around() -> None:
    logits, uniforms = random_input(10, 70, seed=9) * 3, random_uniforms(10, seed=10)
    values = [*random_options(10, 70, seed=11), uniforms]
    together = triton_sample_tokens(logits, *values)
    alone = [triton_sample_tokens(logits[[row]], *(each[[row]] for each in values)) for row in range(10)]
    backwards = triton_sample_tokens(logits.flip(0), *(each.flip(0) for each in values)).flip(0)
    surrounded = triton_sample_tokens(among_poison(logits), *(among_poison(each) for each in values))
    apart = triton_sample_tokens(logits.repeat_interleave(2, 1)[:, ::2], *values)
    assert torch.equal(torch.cat(alone), together)
    assert torch.equal(backwards, together)
    assert torch.equal(surrounded, together)
    assert torch.equal(apart, together)


def test_the_inputs_are_left_alone() -> None:
    logits, uniforms = random_input(4, 50), random_uniforms(4)
    values = random_options(4, 50, seed=1)
    before = [each.clone() for each in (logits, uniforms, *values)]
    triton_sample_tokens(logits, *values, uniforms)
    assert all(torch.equal(*pair) for pair in zip((logits, uniforms, *values), before, strict=True))


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(5, 9000)
    logits[1, [8500, 33, 4129]] = 5.0
    logits[2, -1] = 1.0
    logits[3, :] = -INF
    logits[3, [7, 9]] = -80.0
    logits[4, :] = -0.0
    logits[4, [4, 5]] = 0.0
    assert draw(logits, [0.9] * 5, 0.0) == [0, 33, 8999, 7, 0]


def test_top_k_one_is_greedy() -> None:
    assert draw(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), [0.999], 1.0, 1) == [1]


def test_top_k_keeps_the_lowest_of_equals_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BLOCK_TOKENS", 16)
    logits = torch.zeros(1, 60)
    logits[0, [59, 33, 31, 10, 11]] = 2.0
    logits[0, 45] = 2.5
    uniforms = torch.arange(6).double() / 6
    assert set(draw(logits.expand(6, -1), uniforms, 1.0, 4)) == {10, 11, 31, 45}


def test_top_p_counts_among_equals() -> None:
    """A flat row of 5000: half of it is 2500 tokens, and one more if a little more than half is asked for."""
    logits = torch.full((3, 5000), -3.0)
    last = 1 - 2**-53
    assert draw(logits, [0.0, last, 0.5], 1.0, None, 0.5) == [0, 2499, 1250]
    assert draw(logits, [0.0, last, 0.5], 1.0, None, 0.50001) == [0, 2500, 1250]
    assert draw(logits, [0.0, last, 0.5], 1.0, 1000, 0.5) == [0, 499, 250]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 2.0, 2.0, 2.0]]).log()
    uniforms = torch.arange(12).double() / 12
    # Of 4 + 3 + 2 it takes 4 and 3 to reach 0.75; of all 15 it would take one more.
    assert set(draw(logits.expand(12, -1), uniforms, 1.0, 3, 0.75)) == {0, 1}


def test_a_top_p_next_to_one_leaves_top_k_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums rounded in different orders must not add one of the equals that top_k cut off."""
    monkeypatch.setattr(sampling, "BLOCK_TOKENS", 16)
    logits = torch.full((2, 60), -1.0, device=DEVICE)
    logits[:, 0] = 0.0
    last = torch.full((2,), 1 - 2**-53, dtype=torch.float64, device=DEVICE)
    values = options(2, 1.0, 50, 1 - 2**-53)
    values[0] = torch.tensor([0.5, 1.0], device=DEVICE)
    assert triton_sample_tokens(logits, *values, last).tolist() == [49] * 2


def test_min_p_keeps_a_token_that_is_just_as_likely_as_it_says() -> None:
    uniforms = torch.arange(8).double() / 8
    assert set(draw(torch.tensor([[0.0, 3.0, 1.0, 3.0]]).expand(8, -1), uniforms, 1.0, None, None, 1.0)) == {1, 3}


def test_a_random_number_at_the_very_border_belongs_to_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 equals in four blocks, where every sum is exact."""
    monkeypatch.setattr(sampling, "BLOCK_TOKENS", 16)
    assert draw(torch.zeros(4, 64), [0.0, 0.25, 0.5, 35 / 64]) == [0, 16, 32, 35]


def test_the_extreme_random_numbers_give_the_first_and_the_last_kept_token() -> None:
    logits = torch.full((2, 9000), -INF)
    logits[:, 300:7000] = random_input(6700).cpu()
    last = 1 - 2**-53
    assert draw(logits, [0.0, last]) == [300, 6999]
    assert draw(logits, [0.0, last], 1.0, 6700, 1.0) == [300, 6999]


def test_sums_rounded_in_different_orders_never_lead_past_the_last_token() -> None:
    """Weights of very different sizes, whose float64 sums are not exact."""
    tokens = draw(random_input(16, 200) * 8, [1 - 2**-53] * 16)
    assert max(tokens) < 200


def test_extreme_logits_and_temperatures() -> None:
    logits = torch.tensor(
        [[-3e38, 3e38, 2e38], [3e38, 3e38, -3e38], [1e-40, 2e-40, 0.0], [-INF, -3e38, -INF], [-100.0, 0.0, -90.0]]
    )
    for temperature in (1e-30, 1000.0):
        for values in ((), (None, 0.5), (2, 0.99, 0.001)):
            uniforms = torch.full((5,), 0.7, dtype=torch.float64, device=DEVICE)
            assert_tokens_of_reference(logits.to(DEVICE), options(5, temperature, *values), uniforms)


def test_a_temperature_next_to_zero_is_greedy() -> None:
    assert draw(torch.tensor([[1.0, 3.0, 2.0, -INF]]).expand(2, -1), [0.1, 0.9], 1e-40, 3, 0.9) == [1, 1]


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


def test_a_nan_in_any_block_is_found() -> None:
    logits = torch.zeros(3, 9000)
    logits[0, 8999], logits[1, 4096], logits[2, 0] = math.nan, math.nan, math.nan
    assert draw(logits, [0.5] * 3, 0.0) == [INVALID_TOKEN_ID] * 3


@needs_interpreter
@pytest.mark.parametrize(
    ("values", "num_passes"),
    [((0.0, 5, 0.9), 1), ((1.0,), 2), ((1.0, 0, 1.0, 0.1), 2), ((1.0, 50), 14), ((1.0, 0, 0.9), 14)],
)
def test_rows_pay_for_what_they_ask(values: tuple[float, ...], num_passes: int) -> None:
    """Passes over the memory of a row, but for the one block that the draw looks into again."""
    logits, traffic = random_input(1, 20_000, seed=7) * 3, triton_interpreter.CHECKS.traffic
    before = traffic.loaded_bytes
    draw(logits, [0.5], *values)
    row_bytes, block_bytes = 4 * 20_000, 4 * sampling.BLOCK_TOKENS
    assert (traffic.loaded_bytes - before) // row_bytes <= num_passes
    assert traffic.loaded_bytes - before < num_passes * row_bytes + block_bytes + 64


def test_a_step_without_rows() -> None:
    assert draw(torch.empty(0, 100), [], 1.0, 5) == []


def test_the_search_goes_to_the_last_bit() -> None:
    """Weights that are neighbours among the floats: 1, 1 - 2^-24 and so on."""
    logits = (torch.arange(5) * -6e-8)[None]
    last = 1 - 2**-53
    for num_kept in range(1, 6):
        assert draw(logits, [last], 1.0, num_kept) == [num_kept - 1]
        assert draw(logits, [last], 1.0, None, (num_kept - 0.5) / 5) == [num_kept - 1]
