"""Paged attention against a loop in float64, over ragged batches in poisoned paged memory; and the writes into it."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from attention_cases import PLAIN, Case, Options, Step, build, naive_attention, options_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_close, needs_steady_products, random_tensor

from octavo.kernels.ops.attention import (
    KEY_TILE,
    QUERY_TILE,
    HeadShape,
    PlanCapacity,
    copy_blocks,
    decode_plan_capacity,
    paged_attention,
    plan_attention,
    write_kv,
)
from octavo.kernels.ops.kv_formats import FP8_DTYPE


def run(step: Step, scale: float = 0.35, options: Options = PLAIN) -> torch.Tensor:
    return paged_attention(*step, scale, **options._asdict())


def only(step: Step, rows: Sequence[int]) -> tuple[Step, torch.Tensor]:
    """The step with some requests of it, and where their tokens were."""
    starts = step.query_start_loc.tolist()
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows])
    query_lens = [starts[row + 1] - starts[row] for row in rows]
    query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
    part = Step(
        step.query[tokens], step.kv_cache, query_start_loc, step.seq_lens[list(rows)], step.block_tables[list(rows)]
    )
    return part, tokens


request_lens = st.tuples(st.sampled_from([1, 1, 1, 2, 3, 9, 20]), st.integers(0, 60))
cases = st.builds(
    lambda lens, **options: Case([query for query, _ in lens], [context for _, context in lens], **options),
    st.lists(request_lens, min_size=1, max_size=6),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([4, 6, 16]),
    block_size=st.sampled_from([1, 7, 16]),
    is_first_block_shared=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
    window=st.sampled_from([None, 1, 5, 16, 40]),
    soft_cap=st.sampled_from([None, 2.0]),
    is_fp8=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_ragged_batches(case: Case) -> None:
    step, options = build(case), options_of(case)
    assert_close(run(step, options=options), naive_attention(step, 0.35, options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1, 1, 1], [KEY_TILE - 2, KEY_TILE - 1, KEY_TILE]),
        ([1, 1], [2 * KEY_TILE + 3, 0]),
        ([QUERY_TILE + 1], [0]),
        ([2 * QUERY_TILE], [KEY_TILE]),
        ([3, 1, QUERY_TILE, 1], [KEY_TILE - 1, 2, 1, 3 * KEY_TILE]),
    ],
)
def test_lengths_around_the_tiles(query_lens: list[int], context_lens: list[int], dtype: torch.dtype) -> None:
    step = build(Case(query_lens, context_lens, group=2, dtype=dtype))
    assert_close(run(step), naive_attention(step, 0.35))


@pytest.mark.parametrize("window", [1, KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 2 * KEY_TILE, 1000])
def test_windows_around_the_tiles(window: int) -> None:
    """Requests of which one is past the window of the other's first key tile, among them."""
    case = Case([1, 1, 1, 1, QUERY_TILE + 2], [5, KEY_TILE, 3 * KEY_TILE - 1, 3 * KEY_TILE, 300], window=window)
    step, options = build(case), options_of(case)
    assert_close(run(step, options=options), naive_attention(step, 0.35, options))


def test_a_window_that_covers_everything_changes_no_bit() -> None:
    step = build(MIXED)
    assert torch.equal(run(step, options=PLAIN._replace(window=1000)), run(step))


def test_large_scores_do_not_overflow() -> None:
    step = build(Case([1, 4], [200, 10]))
    assert_close(run(step, scale=40.0), naive_attention(step, 40.0))


def test_requests_without_queries_are_left_out() -> None:
    step = build(Case([2, 0, 1], [3, 4, 5]))
    assert_close(run(step), naive_attention(step, 0.35))


def test_the_result_goes_to_out() -> None:
    step = build(Case([1, 3], [4, 0]))
    out = torch.full_like(step.query, torch.nan)
    assert paged_attention(*step, 0.35, out=out) is out
    assert torch.equal(out, run(step))


MIXED = Case(
    [1, 1, 5, 1, 150, 1], [299, 12, 130, 0, 40, 128], num_kv_heads=3, group=3, head_dim=64, is_first_block_shared=True
)


@needs_steady_products
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_request_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    step = build(MIXED._replace(dtype=dtype))
    together = run(step)
    for rows in ([0], [1], [2], [3], [4], [5], [1, 0], [5, 3, 2, 0], [4, 1]):
        part, tokens = only(step, rows)
        assert torch.equal(run(part), together[tokens]), rows


@needs_steady_products
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("chunk", [1, 7, 64, 140])
def test_a_prompt_has_the_same_bits_in_chunks_of_any_size(chunk: int, group: int, dtype: torch.dtype) -> None:
    """The later tokens' slots are still poison when the earlier chunks run."""
    step = build(Case([150], [0], num_kv_heads=3, group=group, head_dim=64, dtype=dtype))
    whole = run(step)
    tokens = torch.arange(150)
    slots = step.block_tables[0, tokens // 16].long() * 16 + tokens % 16
    for first in range(0, 150, chunk):
        last = min(first + chunk, 150)
        kv_cache = step.kv_cache.clone()
        kv_cache.view(2, -1, 3, 64)[:, slots[last:]] = torch.nan
        starts, seq_lens = (torch.tensor(values, dtype=torch.int32) for values in ([0, last - first], [last]))
        part = paged_attention(step.query[first:last], kv_cache, starts, seq_lens, step.block_tables, 0.35)
        assert torch.equal(part, whole[first:last]), first


def test_neither_block_size_nor_block_ids_change_a_bit() -> None:
    results = []
    for block_size in (1, 7, 16, 512):
        step = build(MIXED._replace(block_size=block_size, is_first_block_shared=False))
        results.append(run(step))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_kv_fills_the_slots_and_nothing_else(dtype: torch.dtype) -> None:
    kv_cache = torch.full((2, 5, 4, 2, 6), torch.nan, dtype=dtype)
    key, value = random_tensor(3, 2, 6, dtype=dtype), random_tensor(3, 2, 6, dtype=dtype, seed=1)

    write_kv(key, value, kv_cache, torch.tensor([13, 0, 19]))

    for token, (block_id, offset) in enumerate([(3, 1), (0, 0), (4, 3)]):
        assert torch.equal(kv_cache[0, block_id, offset], key[token])
        assert torch.equal(kv_cache[1, block_id, offset], value[token])
    assert kv_cache.isfinite().sum() == 2 * 3 * 2 * 6


def test_write_kv_takes_strided_keys() -> None:
    """Key and value are views into the fused projection."""
    qkv = random_tensor(3, 6, 4, dtype=torch.float32)
    kv_cache = torch.zeros(2, 1, 3, 2, 4)
    write_kv(qkv[:, 2:4], qkv[:, 4:6], kv_cache, torch.tensor([0, 1, 2]))
    assert torch.equal(kv_cache[:, 0], torch.stack((qkv[:, 2:4], qkv[:, 4:6])))


def test_write_kv_leaves_out_the_padding_of_graphs() -> None:
    kv_cache = torch.full((2, 1, 4, 2, 6), torch.nan)
    key, value = (random_tensor(4, 2, 6, dtype=torch.float32, seed=seed) for seed in (0, 1))
    write_kv(key, value, kv_cache, torch.tensor([-1, 2, 0, -1]))
    assert torch.equal(kv_cache[:, 0, [2, 0]], torch.stack((key[1:3], value[1:3])))
    assert kv_cache[:, 0, [1, 3]].isnan().all()


def test_write_kv_of_fp8_stores_the_nearest_and_saturates() -> None:
    kv_cache = torch.zeros(2, 1, 4, 1, 2).to(FP8_DTYPE)
    key, value = torch.tensor([[[3.1, -1e6]]]), torch.tensor([[[0.77, 1e6]]])
    write_kv(key, value, kv_cache, torch.tensor([2]), torch.tensor([0.5, 0.25]))
    assert kv_cache[:, 0, 2, 0].float().tolist() == [[6.0, -448.0], [3.0, 448.0]]
    assert kv_cache[:, 0, [0, 1, 3]].float().count_nonzero() == 0


def test_the_reference_plans_nothing() -> None:
    heads = HeadShape(4, 2, 64)
    assert plan_attention(np.ones(3, np.int32), np.full(3, 9, np.int32), heads) is None
    assert decode_plan_capacity(3, 9, heads) == PlanCapacity(0, 0, 0)


@pytest.mark.parametrize("slot", [20, 2**40, -2])
def test_write_kv_refuses_slots_outside_the_cache(slot: int) -> None:
    key = torch.zeros(1, 2, 6)
    with pytest.raises((IndexError, RuntimeError)):
        write_kv(key, key, torch.zeros(2, 5, 4, 2, 6), torch.tensor([slot]))


def test_copy_blocks_between_tiers() -> None:
    device, host = random_tensor(3, 2, 6, 4, 1, 2, dtype=torch.float32), torch.zeros(3, 2, 2, 4, 1, 2)
    copy_blocks(device, host, [(5, 0), (2, 1)])
    assert torch.equal(host, device[:, :, [5, 2]])


def test_copy_blocks_within_one_cache_reads_before_it_writes() -> None:
    cache = random_tensor(2, 2, 4, 4, 1, 2, dtype=torch.float32)
    before = cache.clone()
    copy_blocks(cache, cache, [(0, 1), (1, 2), (2, 0)])
    assert torch.equal(cache, before[:, :, [2, 0, 1, 3]])
    copy_blocks(cache, cache, [])
    assert torch.equal(cache, before[:, :, [2, 0, 1, 3]])
