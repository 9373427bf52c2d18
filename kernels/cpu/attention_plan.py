"""How a step's attention is shared out among threads.

A row of work, times each KV head, is (request, first query, first chunk of the keys, -1): up to `max_item_queries`
queries of a request against all keys up to their own. Or it is (first reduction, minus the number of reductions, first
chunk, number of chunks): one query each of the requests of these reductions against some chunks which they all have in
the same blocks; the results of each chunk are kept, and a row of reductions, (request, first query, first partial
result, 0), joins those of a request. So keys that requests share are read once for all of them, and keys of one request
are split where a step would have too few rows to keep the threads busy. Which rows there are never changes a result,
because the kernel joins chunks in their order in any case. The longest work comes first, so that threads end together.

Requests share what all of those that begin with the same block have in common: a longer prefix that only some of them
have is read by each. Rejected: a tree of prefixes, which costs more to find in every step than it would save.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.ops.attention import AttentionPlan, BlockTables, HeadShape, PlanCapacity

CHUNK_TOKENS = 128  # kChunkTokens of csrc/attention_tiles.h
ITEM_ROWS = 96  # queries times query heads of a KV head: enough to make up for finding the keys
ITEMS_PER_THREAD = 8
QUERY_COST = 8  # as many queries of an item cost what reading its keys costs
MAX_SHARED_PARTIALS = 4096  # results of chunks of requests that share keys, which bounds the memory for them

NO_ROWS = np.zeros((0, 4), np.int32)


def _min_items() -> int:
    """Return how many items of work, rows times KV heads, a step should have."""
    return ITEMS_PER_THREAD * EXECUTOR.num_threads


def max_item_queries(heads: HeadShape) -> int:
    """Return the most queries of one item of work."""
    return max(1, ITEM_ROWS * heads.num_kv_heads // heads.num_query_heads)


class _Rows(NamedTuple):
    """Rows of work, int32 [W, 4], and what each costs: keys times queries, with QUERY_COST for reading the keys."""

    work: np.ndarray
    costs: np.ndarray


class _Group(NamedTuple):
    """Requests whose first chunks of keys lie in the same blocks."""

    requests: np.ndarray
    num_chunks: int


def _tile_rows(query_lens: np.ndarray, seq_lens: np.ndarray, several: np.ndarray, num_queries: int) -> _Rows:
    """Return rows for the requests `several`, which have more than one query."""
    num_tiles = -(-query_lens[several] // num_queries)
    rows = np.full((int(num_tiles.sum()), 4), (0, 0, 0, -1), np.int32)
    rows[:, 0] = request = np.repeat(several, num_tiles)
    rows[:, 1] = (np.arange(len(rows)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * num_queries
    queries = np.minimum(query_lens[request] - rows[:, 1], num_queries)
    keys = seq_lens[request] - query_lens[request] + rows[:, 1] + queries
    return _Rows(rows, keys * (QUERY_COST + queries))


def _num_chunks(seq_lens: np.ndarray) -> np.ndarray:
    return -(-seq_lens.astype(np.int64) // CHUNK_TOKENS)


def _find_groups(tables: BlockTables | None, seq_lens: np.ndarray, single: np.ndarray) -> list[_Group]:
    """Return which of the requests with one query share keys; no more than MAX_SHARED_PARTIALS allow."""
    if tables is None:
        return []
    first = tables.block_ids[single, 0].tolist()
    if len(set(first)) == len(first):
        return []
    groups, num_partials = [], 0
    _, inverse, counts = np.unique(first, return_inverse=True, return_counts=True)
    for index in np.flatnonzero(counts > 1):
        requests = single[inverse == index]
        is_same = (tables.block_ids[requests] == tables.block_ids[requests[0]]).all(axis=0)
        num_blocks = len(is_same) if is_same.all() else int(is_same.argmin())
        num_tokens = min(num_blocks * tables.block_size, int(seq_lens[requests].min()))
        num_partials += int(_num_chunks(seq_lens[requests]).sum())
        if num_tokens >= CHUNK_TOKENS and num_partials <= MAX_SHARED_PARTIALS:
            groups.append(_Group(requests, num_tokens // CHUNK_TOKENS))
    return groups


def _group_rows(groups: list[_Group], num_chunks_each: int, max_queries: int) -> _Rows:
    """Return rows for what groups share; the reductions of their requests come first, in their order."""
    rows, first_reduction = [], 0
    for requests, num_chunks in groups:
        for start in range(0, len(requests), max_queries):
            num_requests = min(max_queries, len(requests) - start)
            rows += [
                (first_reduction, -num_requests, chunk, min(num_chunks_each, num_chunks - chunk))
                for chunk in range(0, num_chunks, num_chunks_each)
            ]
            first_reduction += num_requests
    work = np.array(rows, np.int32).reshape(-1, 4)
    return _Rows(work, work[:, 3].astype(np.int64) * CHUNK_TOKENS * (QUERY_COST - work[:, 1]))


def _own_rows(
    seq_lens: np.ndarray, single: np.ndarray, num_shared: np.ndarray, num_chunks_each: int
) -> tuple[_Rows, np.ndarray, int]:
    """Return rows for what requests with one query do not share, the reductions, and the number of partial results.

    Args:
        single: the requests, those that share first.
        num_shared: chunks that each of them shares, 0 or more.
    """
    num_chunks = _num_chunks(seq_lens[single])
    num_own = num_chunks - num_shared
    is_joined = (num_shared > 0) | (num_own > num_chunks_each)
    num_rows = np.where(is_joined, -(-num_own // num_chunks_each), 1)
    reductions = np.zeros((int(is_joined.sum()), 4), np.int32)
    reductions[:, 0] = single[is_joined]
    reductions[:, 2] = np.cumsum(num_chunks[is_joined]) - num_chunks[is_joined]
    owner = np.repeat(np.arange(len(single)), num_rows)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    joined = is_joined[owner]
    first_chunk = num_shared[owner] + part * num_chunks_each
    work = np.zeros((len(owner), 4), np.int32)
    work[:, 0] = np.where(joined, np.cumsum(is_joined)[owner] - 1, single[owner])
    work[:, 1] = np.where(joined, -1, 0)
    work[:, 2] = first_chunk
    work[:, 3] = np.where(joined, num_chunks_each, -1)
    keys = seq_lens[single][owner] - first_chunk * CHUNK_TOKENS
    keys = np.where(joined, np.minimum(keys, num_chunks_each * CHUNK_TOKENS), keys)
    return _Rows(work, keys * (QUERY_COST + 1)), reductions, int(num_chunks[is_joined].sum())


def _single_rows(
    seq_lens: np.ndarray, single: np.ndarray, groups: list[_Group], heads: HeadShape
) -> tuple[list[_Rows], np.ndarray, int]:
    """Return rows for the requests with one query, the reductions, and the number of partial results."""
    num_shared = np.zeros(len(seq_lens), np.int64)
    num_keys, num_parts = int(seq_lens[single].sum()), len(single) + len(groups)
    for requests, num_chunks in groups:
        num_shared[requests] = num_chunks
        num_keys -= (len(requests) - 1) * num_chunks * CHUNK_TOKENS
    num_chunks_each = _split_tokens(num_keys, num_parts, heads) // CHUNK_TOKENS
    if groups:
        single = np.concatenate([*(group.requests for group in groups), single[num_shared[single] == 0]])
    shared = _group_rows(groups, num_chunks_each, max_item_queries(heads))
    own, reductions, num_partials = _own_rows(seq_lens, single, num_shared[single], num_chunks_each)
    return [shared, own], reductions, num_partials


def _split_tokens(num_keys: int, num_requests: int, heads: HeadShape) -> int:
    """Return how many keys, a multiple of CHUNK_TOKENS, a row of work with one query may have."""
    num_chunks = num_keys // CHUNK_TOKENS + num_requests
    return max(1, num_chunks * heads.num_kv_heads // _min_items()) * CHUNK_TOKENS


def _unsplit_rows(seq_lens: np.ndarray) -> np.ndarray:
    """Return a row of work for each request, the longest first; each has one query."""
    work = np.zeros((len(seq_lens), 4), np.int32)
    work[:, 0] = (-seq_lens).argsort(kind="stable")
    work[:, 3] = -1
    return work


def make_plan(
    query_lens: np.ndarray, seq_lens: np.ndarray, heads: HeadShape, tables: BlockTables | None = None
) -> AttentionPlan:
    """Return the plan of a step; the arguments are those of `plan_attention`."""
    num_requests = len(seq_lens)
    single, several = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
    groups = _find_groups(tables, seq_lens, single)
    is_plain = not groups and len(single) == num_requests > 0
    if is_plain and int(seq_lens.max()) <= _split_tokens(int(seq_lens.sum()), num_requests, heads):
        return AttentionPlan(torch.from_numpy(_unsplit_rows(seq_lens)), torch.from_numpy(NO_ROWS), 0, 0, 0)
    rows, reductions, num_partials = _single_rows(seq_lens, single, groups, heads)
    rows.append(_tile_rows(query_lens, seq_lens, several, max_item_queries(heads)))
    order = np.argsort(-np.concatenate([part.costs for part in rows]), kind="stable")
    work = np.concatenate([part.work for part in rows])[order]
    return AttentionPlan(torch.from_numpy(work), torch.from_numpy(reductions), num_partials, 0, 0)


def plan_capacity(
    num_requests: int, max_model_len: int, heads: HeadShape, num_slots: int | None = None
) -> PlanCapacity:
    """Return how large the plan of a step of one query for each request can be.

    Args:
        num_requests: of the step, at most.
        max_model_len: the most tokens of a request.
        num_slots: tokens of all requests together, at most; None: `max_model_len` of each.
    """
    max_parts = 2 * _min_items() // heads.num_kv_heads  # rows of work beyond one for each part, by `_split_tokens`
    max_split = min(num_requests, max_parts)
    max_chunks = -(-max_model_len // CHUNK_TOKENS)
    num_chunks = max_split * max_chunks
    if num_slots is not None:
        num_chunks = min(num_chunks, max_split + num_slots // CHUNK_TOKENS)
    num_shared = min(num_requests * max_chunks, MAX_SHARED_PARTIALS) if num_requests > 1 else 0
    num_rows = num_requests + min(num_chunks, max_parts) + (num_requests if num_shared else 0)
    return PlanCapacity(num_rows, num_requests if num_shared else max_split, num_chunks + num_shared)
