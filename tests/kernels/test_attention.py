"""Paged attention against a loop in float64, over ragged batches in poisoned paged memory; and the writes into it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_close, needs_steady_products, random_tensor

from octavo.kernels.ops.attention import KEY_TILE, QUERY_TILE, copy_blocks, paged_attention, write_kv


class Case(NamedTuple):
    """One step: the queries and keys of each request, how memory is cut, and which requests share the first block."""

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 8
    block_size: int = 16
    is_first_block_shared: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def seq_lens(self) -> list[int]:
        return [query + context for query, context in zip(self.query_lens, self.context_lens, strict=True)]


class Step(NamedTuple):
    """The arguments of paged_attention but for the scale, and each request's own queries, keys and values."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


def build(case: Case) -> Step:
    """Lay the requests out in blocks of shuffled ids; every slot that holds no token of a request is NaN."""
    generator = torch.Generator().manual_seed(case.seed)
    num_blocks = [math.ceil(seq_len / case.block_size) for seq_len in case.seq_lens]
    shuffled = torch.randperm(sum(num_blocks) + 3, generator=torch.Generator().manual_seed(case.seed))
    block_ids = shuffled.tolist()
    tables = [[block_ids.pop() for _ in range(number)] for number in num_blocks]
    if case.is_first_block_shared:
        for table, seq_len in zip(tables, case.seq_lens, strict=True):
            if min(seq_len, case.seq_lens[0]) >= case.block_size:
                table[0] = tables[0][0]
    shape = (2, sum(num_blocks) + 3, case.block_size, case.num_kv_heads, case.head_dim)
    kv_cache = torch.full(shape, torch.nan, dtype=case.dtype)
    block_tables = torch.full((len(tables), max(num_blocks) + 1), 2**31 - 1, dtype=torch.int32)  # never to be read
    for row, (table, seq_len) in enumerate(zip(tables, case.seq_lens, strict=True)):
        block_tables[row, : len(table)] = torch.tensor(table)
        for token in range(seq_len):
            vectors = torch.randn(2, case.num_kv_heads, case.head_dim, generator=generator)
            kv_cache[:, table[token // case.block_size], token % case.block_size] = vectors.to(case.dtype)
    query_shape = (sum(case.query_lens), case.num_kv_heads * case.group, case.head_dim)
    query = torch.randn(query_shape, generator=generator).to(case.dtype)
    starts = torch.tensor([0, *case.query_lens]).cumsum(0).int()
    return Step(query, kv_cache, starts, torch.tensor(case.seq_lens, dtype=torch.int32), block_tables)


def naive_attention(step: Step, scale: float) -> torch.Tensor:
    """Every query and head by itself, over its request's slots looked up one by one."""
    query, kv_cache = step.query.double().numpy(), step.kv_cache.double().numpy()
    block_size, group = kv_cache.shape[2], query.shape[1] // kv_cache.shape[3]
    result = np.zeros(query.shape)
    for row, seq_len in enumerate(step.seq_lens.tolist()):
        first, last = step.query_start_loc[row : row + 2].tolist()
        slots = [(int(step.block_tables[row, token // block_size]), token % block_size) for token in range(seq_len)]
        vectors = np.stack([kv_cache[:, block, offset] for block, offset in slots], axis=1)
        for token in range(first, last):
            num_visible = seq_len - (last - 1 - token)
            for head in range(query.shape[1]):
                keys, values = vectors[:, :num_visible, head // group]
                scores = (keys @ query[token, head]) * scale
                weights = np.exp(scores - scores.max())
                result[token, head] = (weights @ values) / weights.sum()
    return torch.from_numpy(result)


def run(step: Step, scale: float = 0.35) -> torch.Tensor:
    return paged_attention(*step, scale)


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
)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_ragged_batches(case: Case) -> None:
    step = build(case)
    assert_close(run(step), naive_attention(step, 0.35))


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


@pytest.mark.parametrize("slot", [20, 2**40, -1])
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
