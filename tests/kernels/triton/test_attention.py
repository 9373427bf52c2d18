"""Ragged paged attention on a GPU, both backends, against float64 over steps in poisoned memory.

Most tests make the tiles and the splits small, so that steps of some dozen tokens have many of each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import PLAIN, Case, Options, Step, build, naive_attention, options_of
from kernel_checks import assert_close

from octavo.kernels.ops.attention import AttentionPlan
from octavo.kernels.triton import attention, attention_plan
from octavo.kernels.triton.attention import (
    deterministic_paged_attention,
    deterministic_plan_attention,
    triton_paged_attention,
    triton_plan_attention,
)
from octavo.kernels.triton.attention_plan import TileShape

SCALE = 0.2
BACKENDS = {
    "triton": (triton_paged_attention, triton_plan_attention),
    "deterministic": (deterministic_paged_attention, deterministic_plan_attention),
}
NUM_PADDING = 3  # rows of the plan and of the tokens, as a graph has them
HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = TileShape(16, 16, 32, 1, 2), TileShape(32, 16, 64, 1, 2)
    for device in (attention_plan.HOPPER, attention_plan.AMPERE, attention_plan.AMD):
        for table, tile in zip(device, (narrow, wide, narrow), strict=True):
            for padded_head_dim in table:
                monkeypatch.setitem(table, padded_head_dim, tile)


def padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat((rows, torch.full((NUM_PADDING, 4), -1, dtype=torch.int32)))


def run(step: Step, case: Case, backend: str, window_of_plan: int | None = -1) -> torch.Tensor:
    """Follow a padded plan into an output of NaN with rows to spare, which have to stay as they are."""
    attend, plan_attention = BACKENDS[backend]
    query_lens = np.array(case.query_lens, dtype=np.int32)
    seq_lens = np.array(case.seq_lens, dtype=np.int32)
    window = case.window if window_of_plan == -1 else window_of_plan
    plan = plan_attention(query_lens, seq_lens, case.heads, window)
    assert plan is not None
    plan = plan._replace(work=padded(plan.work), reductions=padded(plan.reductions))
    num_tokens = len(step.query)
    query = torch.cat((step.query, step.query.new_full((NUM_PADDING, *step.query.shape[1:]), torch.nan)))
    out = torch.full_like(query, torch.nan)

    result = attend(query, *step[1:], SCALE, out, **options_of(case)._asdict(), plan=plan)

    assert result is out
    assert out[num_tokens:].isnan().all()
    return out[:num_tokens]


def check(case: Case, backend: str) -> None:
    step = build(case)
    assert_close(run(step, case, backend), naive_attention(step, SCALE, options_of(case)))


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    num_requests = rng.randint(1, 5)
    is_fp8 = rng.random() < 0.3
    return Case(
        [rng.choice([0, 1, 1, 1, 2, 5, 9, 21]) for _ in range(num_requests)],
        [rng.choice([0, 1, 15, 16, 31, 32, 33, 63, 64, 70, 100]) for _ in range(num_requests)],
        num_kv_heads=rng.choice([1, 2]),
        group=rng.choice([1, 3, 4, 8]),
        head_dim=HEAD_DIMS[seed % len(HEAD_DIMS)],
        block_size=rng.choice([16, 32, 64]),
        is_first_block_shared=rng.random() < 0.3,
        dtype=rng.choice(DTYPES[:2] if is_fp8 else DTYPES),
        seed=seed,
        window=rng.choice([None, None, 1, 5, 16, 33, 1000]),
        soft_cap=rng.choice([None, None, 1.5]),
        is_fp8=is_fp8,
    )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(40))
def test_random_ragged_steps(seed: int) -> None:
    check(random_case(seed), "triton")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("seed", range(100, 120))
def test_random_ragged_steps_deterministically(seed: int) -> None:
    check(random_case(seed), "deterministic")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [1, 8, 20])
def test_lengths_around_blocks_tiles_and_splits(group: int, backend: str) -> None:
    seq_lens = [1, 15, 16, 17, 31, 32, 33, 64, 65]
    check(Case([1] * 9, [seq_len - 1 for seq_len in seq_lens], group=group, head_dim=64, dtype=torch.float16), backend)
    check(Case([7, 8, 9, 33], [25, 24, 23, 31], group=group, head_dim=64, dtype=torch.float16), backend)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 15, 16, 17, 31, 32, 33, 64])
def test_windows_around_tiles_and_splits(window: int, backend: str) -> None:
    check(Case([1, 1, 1, 35], [95, 96, 97, 40], head_dim=64, dtype=torch.float16, window=window), backend)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_without_a_window_serves_layers_with_one(backend: str) -> None:
    case = Case([1, 1, 20, 40], [99, 20, 90, 60], group=2, head_dim=64, dtype=torch.float16, window=7)
    step = build(case)
    got = run(step, case, backend, window_of_plan=None)
    assert_close(got, naive_attention(step, SCALE, options_of(case)))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_tiles_and_splits_of_the_product(head_dim: int) -> None:
    lens = [0, 510, 511, 512, 1023, 1024]
    check(Case([1] * 6, lens, group=4, head_dim=head_dim, dtype=torch.bfloat16), "triton")
    check(Case([3, 140, 1], [4095, 1, 600], group=2, head_dim=head_dim, dtype=torch.bfloat16), "triton")
    check(Case([3, 1], [1023, 1100], group=2, head_dim=head_dim, dtype=torch.bfloat16), "deterministic")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
def test_few_programs_do_many_items(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_NUM_PROGRAMS", 6)
    check(Case([1, 30, 1, 1], [99, 40, 0, 64], num_kv_heads=2, head_dim=64, dtype=torch.float16), backend)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_plan_and_without_an_output(backend: str) -> None:
    case = Case([1, 9, 0, 1], [70, 40, 3, 5], group=3, head_dim=64, dtype=torch.float16, window=50)
    step, options = build(case), options_of(case)
    got = BACKENDS[backend][0](*step, SCALE, **options._asdict())
    assert got.is_contiguous()
    assert_close(got, naive_attention(step, SCALE, options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("query_lens", [[], [0], [0, 0]])
def test_steps_without_queries(query_lens: list[int], backend: str) -> None:
    case = Case(query_lens, [5] * len(query_lens), head_dim=64, dtype=torch.bfloat16)
    assert run(build(case), case, backend).shape == (0, 1, 64)


def test_a_plan_of_padding_alone_writes_nothing() -> None:
    step = build(Case([1], [5], head_dim=64, dtype=torch.bfloat16))
    rows = torch.full((4, 4), -1, dtype=torch.int32)
    out = torch.full_like(step.query, torch.nan)
    triton_paged_attention(*step, SCALE, out, plan=AttentionPlan(rows, rows, 4, 0, 0))
    assert out.isnan().all()


@pytest.mark.usefixtures("small_tiles")
def test_query_and_output_in_wider_tensors() -> None:
    """As the query lies in the fused projection."""
    case = Case([1, 9], [70, 40], num_kv_heads=2, group=2, head_dim=64, dtype=torch.float16)
    step = build(case)
    fused, wide = (torch.full((10, 8, 64), torch.nan, dtype=torch.float16) for _ in range(2))
    fused[:, :4] = step.query
    triton_paged_attention(fused[:, :4], *step[1:], SCALE, wide[:, 2:6])
    assert_close(wide[:, 2:6], naive_attention(step, SCALE))
    assert wide[:, :2].isnan().all()
    assert wide[:, 6:].isnan().all()


@pytest.mark.usefixtures("small_tiles")
def test_large_scores_do_not_overflow() -> None:
    step = build(Case([1, 20], [99, 40], head_dim=64, dtype=torch.float32))
    assert_close(triton_paged_attention(*step, 30.0), naive_attention(step, 30.0))


def bits_of_each_query(
    case: Case, step: Step, cuts: Sequence[int], options: Options, has_company: bool = False
) -> torch.Tensor:
    """The result of the only request of a step, its prompt cut into chunks; later slots are poison in each of them."""
    num_tokens = len(step.query)
    tokens = torch.arange(num_tokens)
    slots = step.block_tables[0, tokens // case.block_size].long() * case.block_size + tokens % case.block_size
    results = []
    for first, last in pairwise([0, *cuts, num_tokens]):
        kv_cache = step.kv_cache.clone()
        kv_cache.view(torch.uint8).view(2, -1, kv_cache[0, 0, 0].nbytes)[:, slots[last:]] = 0xFF  # NaN in every dtype
        starts, lens = [0, last - first], [last]
        query, tables = step.query[first:last], step.block_tables
        if has_company:
            query = torch.cat((step.query[3:4], query, step.query[:5]))
            starts, lens = [0, 1, 1 + last - first, 6 + last - first], [1, last, 5]
            tables = tables.expand(3, -1).contiguous()
        numbers = (torch.tensor(values, dtype=torch.int32) for values in (starts, lens))
        result = deterministic_paged_attention(query, kv_cache, *numbers, tables, SCALE, **options._asdict())
        results.append(result[1 : 1 + last - first] if has_company else result)
    return torch.cat(results)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "changes",
    [
        {"group": 1},
        {"group": 3, "window": 20},
        {"group": 4, "soft_cap": 2.0},
        {"group": 8, "is_fp8": True},
        {"group": 4, "window": 18, "soft_cap": 2.0, "is_fp8": True},
    ],
    ids=str,
)
def test_a_query_has_the_same_bits_in_decode_in_a_chunk_and_in_a_whole_prompt(changes: dict[str, Any]) -> None:
    case = Case([41], [0], head_dim=64, dtype=torch.float32, **changes)  # fp32 shows every bit of the sums
    step, options = build(case._replace(window=None)), options_of(case)
    whole = bits_of_each_query(case, step, [], options)
    assert_close(whole, naive_attention(step, SCALE, options))
    assert torch.equal(bits_of_each_query(case, step, [1, 18, 33], options), whole)
    assert torch.equal(bits_of_each_query(case, step, [30], options, has_company=True), whole)
    assert torch.equal(bits_of_each_query(case, step, [32, 38, 39, 40], options), whole)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_has_the_same_bits_in_any_company(backend: str) -> None:
    case = Case([1, 9, 1, 30], [99, 70, 3, 40], group=4, head_dim=64, dtype=torch.float32)
    step = build(case)
    together = run(step, case, backend)
    starts = step.query_start_loc.tolist()
    for row, (first, last) in enumerate(pairwise(starts)):
        alone = case._replace(query_lens=case.query_lens[row : row + 1], context_lens=case.context_lens[row : row + 1])
        loc = torch.tensor([0, last - first], dtype=torch.int32)
        part = Step(
            step.query[first:last], step.kv_cache, loc, step.seq_lens[row : row + 1], step.block_tables[row : row + 1]
        )
        assert torch.equal(run(part, alone, backend), together[first:last])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 4, 64)}, "kv_cache of"),
        ({"kv_scales": torch.ones(2)}, "kv_cache of"),
        ({"query": torch.zeros(1, 3, 64, dtype=torch.bfloat16)}, "does not fit"),
        ({"query": torch.zeros(1, 4, 80, dtype=torch.bfloat16)}, "does not fit"),
        ({"query": torch.zeros(1, 4, 128, dtype=torch.bfloat16)[..., ::2]}, "side by side"),
        ({"scale": 0.0}, "scale 0.0"),
        ({"window": 0}, "window 0"),
        ({"soft_cap": -1.0}, "soft_cap -1.0"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    step = build(Case([1], [5], num_kv_heads=2, group=2, head_dim=64, dtype=torch.bfloat16))
    arguments = {**step._asdict(), "scale": SCALE, **PLAIN._asdict(), **change}
    with pytest.raises(ValueError, match=message):
        triton_paged_attention(**arguments)


def test_large_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 288"):
        attention_plan.pad_head_dim(288)
