"""Plans of attention: every query meets every key that it sees once, results have room, capacities hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.ops.attention import AttentionPlan, HeadShape
from octavo.kernels.triton.attention import (
    deterministic_decode_plan_capacity,
    deterministic_plan_attention,
    triton_decode_plan_capacity,
    triton_plan_attention,
)
from octavo.kernels.triton.attention_plan import MAX_SPLIT_TILES, TileShape, fast_tiling, num_tile_rows, steady_tiling

BACKENDS = {
    "triton": (triton_plan_attention, triton_decode_plan_capacity, fast_tiling),
    "deterministic": (deterministic_plan_attention, deterministic_decode_plan_capacity, steady_tiling),
}
HEADS = HeadShape(32, 8, 128)
GROUP = 4
backends = st.sampled_from(list(BACKENDS))
query_lens = st.sampled_from([0, 1, 1, 1, 2, 31, 32, 33, 128, 129, 500])
context_lens = st.one_of(st.integers(0, 20_000), st.sampled_from([0, 511, 512, 1023, 1024, 4095, 4096, 100_000]))
requests = st.lists(st.tuples(query_lens, context_lens), max_size=6)
windows = st.sampled_from([None, 1, 512, 1000, 4096, 10**6])


def numbers(lens: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    queries = np.array([query for query, _ in lens], dtype=np.int32)
    return queries, queries + np.array([context for _, context in lens], dtype=np.int32)


def plan_of(backend: str, lens: list[tuple[int, int]], window: int | None, heads: HeadShape = HEADS) -> AttentionPlan:
    plan = BACKENDS[backend][0](*numbers(lens), heads, window)
    assert plan is not None
    return plan


def rows_with_tiles(plan: AttentionPlan, backend: str) -> list[tuple[TileShape, list[int]]]:
    tiling = BACKENDS[backend][2](HEADS.head_dim)
    rows = plan.work.tolist()
    wide = [] if tiling.wide is None else [(tiling.wide, row) for row in rows[: plan.num_wide_work]]
    return [*wide, *((tiling.narrow, row) for row in rows[len(wide) :])]


@settings(max_examples=100, deadline=None)
@given(backend=backends, lens=requests, window=windows)
def test_every_query_meets_every_key_that_it_sees_once(
    backend: str, lens: list[tuple[int, int]], window: int | None
) -> None:
    plan = plan_of(backend, lens, window)
    assert len({tuple(row[:3]) for row in plan.work.tolist()}) == len(plan.work)
    met: Counter[tuple[int, int]] = Counter()
    for tile, (request, first_query, split, partial) in rows_with_tiles(plan, backend):
        query_len, context_len = lens[request]
        first_key = split * tile.split_keys
        for query in range(first_query, min(query_len, first_query + num_tile_rows(tile, GROUP) // GROUP)):
            end_key = context_len + query + 1
            if partial >= 0:
                end_key = min(end_key, first_key + tile.split_keys)
            met[request, query] += max(0, end_key - max(first_key, first_seen(context_len + query, window)))
    assert met == {
        (request, query): context_len + query + 1 - first_seen(context_len + query, window)
        for request, (query_len, context_len) in enumerate(lens)
        for query in range(query_len)
    }


def first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


@settings(max_examples=100, deadline=None)
@given(backend=backends, lens=requests, window=windows)
def test_partial_results_have_room_and_are_joined_in_order(
    backend: str, lens: list[tuple[int, int]], window: int | None
) -> None:
    plan = plan_of(backend, lens, window)
    partials: dict[tuple[int, int], list[tuple[int, int]]] = {}
    taken: list[int] = []
    for tile, (request, first_query, split, partial) in rows_with_tiles(plan, backend):
        if partial >= 0:
            num_queries = min(lens[request][0] - first_query, num_tile_rows(tile, GROUP) // GROUP)
            partials.setdefault((request, first_query), []).append((split, partial))
            taken += range(partial, partial + num_queries)
    assert sorted(taken) == list(range(plan.num_partials))
    joined = {}
    for request, first_query, first_partial, num_splits in plan.reductions.tolist():
        tile = tile_of(backend, lens[request][0])
        num_queries = min(lens[request][0] - first_query, num_tile_rows(tile, GROUP) // GROUP)
        joined[request, first_query] = [first_partial + i * num_queries for i in range(num_splits)]
    assert joined == {key: [partial for _, partial in sorted(splits)] for key, splits in partials.items()}
    if BACKENDS[backend][2](HEADS.head_dim).wide is not None:
        is_wide = [lens[row[0]][0] > 1 for row in plan.reductions.tolist()]
        assert is_wide == [i < plan.num_wide_reductions for i in range(len(is_wide))]


def tile_of(backend: str, query_len: int) -> TileShape:
    tiling = BACKENDS[backend][2](HEADS.head_dim)
    return tiling.wide if tiling.wide is not None and query_len > 1 else tiling.narrow


@settings(max_examples=100, deadline=None)
@given(backend=backends, lens=st.lists(st.tuples(query_lens, context_lens), min_size=1, max_size=6), window=windows)
def test_a_request_is_cut_the_same_in_any_company(
    backend: str, lens: list[tuple[int, int]], window: int | None
) -> None:
    together = plan_of(backend, lens, window).work.tolist()
    for request, request_lens in enumerate(lens):
        alone = plan_of(backend, [request_lens], window).work.tolist()
        mine = [row for row in together if row[0] == request]
        assert sorted((row[1], row[2], row[3] < 0) for row in mine) == sorted(
            (row[1], row[2], row[3] < 0) for row in alone
        )


@settings(max_examples=100, deadline=None)
@given(
    backend=backends,
    seq_lens=st.lists(st.integers(1, 9000), min_size=1, max_size=40),
    num_spare=st.integers(0, 3),
    window=windows,
)
def test_decode_fits_into_its_capacity(backend: str, seq_lens: list[int], num_spare: int, window: int | None) -> None:
    plan = plan_of(backend, [(1, seq_len - 1) for seq_len in seq_lens], window)
    for num_slots in (None, sum(seq_lens)):
        capacity = BACKENDS[backend][1](len(seq_lens) + num_spare, max(seq_lens), HEADS, num_slots)
        assert len(plan.work) <= capacity.num_work
        assert len(plan.reductions) <= capacity.num_reductions
        assert plan.num_partials <= capacity.num_partials
    assert plan.num_wide_work == plan.num_wide_reductions == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_capacities_are_reached(backend: str) -> None:
    _, capacity_of, tiling = BACKENDS[backend]
    split_keys = tiling(HEADS.head_dim).narrow.split_keys
    plan = plan_of(backend, [(1, 3 * split_keys - 1)] * 5, None)
    assert capacity_of(5, 3 * split_keys, HEADS, None) == (len(plan.work), len(plan.reductions), plan.num_partials)
    short = plan_of(backend, [(1, split_keys - 1)] * 5, None)
    assert capacity_of(5, split_keys, HEADS, None) == (len(short.work), 0, 0)
    assert capacity_of(256, 131_072, HEADS, 500_000).num_work == 256 + 500_000 // split_keys


def test_wide_work_comes_first_and_its_longest_tiles_before_the_others() -> None:
    plan = plan_of("triton", [(1, 700), (100, 0), (1, 5), (300, 900)], None)
    wide = plan.work[: plan.num_wide_work].tolist()
    assert {row[0] for row in wide} == {1, 3}
    assert wide[0][:2] == [3, 288]
    assert {row[0] for row in plan.work[plan.num_wide_work :].tolist()} == {0, 2}


def test_only_requests_of_few_tiles_are_split() -> None:
    tile_queries = fast_tiling(128).wide.num_rows // 4
    few, many = MAX_SPLIT_TILES * tile_queries, MAX_SPLIT_TILES * tile_queries + 1
    assert len(plan_of("triton", [(few, 5000)], None).reductions) == MAX_SPLIT_TILES
    assert len(plan_of("triton", [(many, 5000)], None).reductions) == 0


def test_a_group_larger_than_the_tile_widens_it() -> None:
    plan = plan_of("triton", [(1, 9), (3, 0)], None, HeadShape(200, 1, 128))
    assert sorted(plan.work.tolist()) == [[0, 0, 0, -1], [1, 0, 0, -1], [1, 1, 0, -1], [1, 2, 0, -1]]
