"""How a step's attention is shared out among threads.

A row of work is (request, first query, first chunk of the keys, reduction): up to `max_item_queries` queries of a
request, times each KV head. Reduction -1: against all keys up to their own. Else the row has one query, and sees as
many chunks as the reduction says; the partial result of each chunk is kept, and a row of reductions, (request, first
query, first partial result, chunks of a row of work), joins them. Which rows there are never changes a result, because
the kernel joins chunks in their order in either case. So keys are split only where a step would have too few rows to
keep the threads busy. The longest work comes first, so that threads end together.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.ops.attention import AttentionPlan, HeadShape, PlanCapacity

CHUNK_TOKENS = 128  # kChunkTokens of csrc/attention_tiles.h
ITEM_ROWS = 96  # queries times query heads of a KV head: enough to make up for finding the keys
ITEMS_PER_THREAD = 8
QUERY_COST = 8  # as many queries of an item cost what reading its keys costs

NO_ROWS = np.zeros((0, 4), np.int32)


def _min_items() -> int:
    """Return how many items of work, rows times KV heads, a step should have."""
    return ITEMS_PER_THREAD * EXECUTOR.num_threads


def max_item_queries(heads: HeadShape) -> int:
    """Return the most queries of one item of work."""
    return max(1, ITEM_ROWS * heads.num_kv_heads // heads.num_query_heads)


def _tile_rows(query_lens: np.ndarray, several: np.ndarray, num_queries: int) -> np.ndarray:
    """Return rows of work of the requests `several`, which have more than one query."""
    num_tiles = -(-query_lens[several] // num_queries)
    rows = np.full((int(num_tiles.sum()), 4), (0, 0, 0, -1), np.int32)
    rows[:, 0] = np.repeat(several, num_tiles)
    first = np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    rows[:, 1] = (np.arange(len(rows)) - first) * num_queries
    return rows


def _split_rows(seq_lens: np.ndarray, single: np.ndarray, num_chunks_each: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return rows of work and of reductions for requests with one query, and the number of partial results."""
    num_chunks = -(-seq_lens[single].astype(np.int64) // CHUNK_TOKENS)
    is_split = num_chunks > num_chunks_each
    num_rows = np.where(is_split, -(-num_chunks // num_chunks_each), 1)
    split = single[is_split]
    reductions = np.zeros((len(split), 4), np.int32)
    reductions[:, 0], reductions[:, 3] = split, num_chunks_each
    reductions[:, 2] = np.cumsum(num_chunks[is_split]) - num_chunks[is_split]
    work = np.zeros((int(num_rows.sum()), 4), np.int32)
    work[:, 0] = np.repeat(single, num_rows)
    first = np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    work[:, 2] = (np.arange(len(work)) - first) * num_chunks_each
    work[:, 3] = np.repeat(np.where(is_split, np.cumsum(is_split) - 1, -1), num_rows)
    return work, reductions, int(num_chunks[is_split].sum())


def _longest_first(work: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, num_queries: int) -> np.ndarray:
    request = work[:, 0]
    queries = np.minimum(query_lens[request] - work[:, 1], num_queries)
    keys = seq_lens[request] - query_lens[request] + work[:, 1] + queries
    return work[np.argsort(-keys * (QUERY_COST + queries), kind="stable")]


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


def make_plan(query_lens: np.ndarray, seq_lens: np.ndarray, heads: HeadShape) -> AttentionPlan:
    """Return the plan of a step; the arguments are those of `plan_attention`."""
    num_requests = len(seq_lens)
    is_decode = num_requests > 0 and query_lens.max() == 1 == query_lens.min()
    if is_decode and int(seq_lens.max()) <= _split_tokens(int(seq_lens.sum()), num_requests, heads):
        return AttentionPlan(torch.from_numpy(_unsplit_rows(seq_lens)), torch.from_numpy(NO_ROWS), 0, 0, 0)
    num_queries = max_item_queries(heads)
    single, several = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
    tokens = _split_tokens(int(seq_lens[single].sum()), len(single), heads)
    decode, reductions, num_partials = _split_rows(seq_lens, single, tokens // CHUNK_TOKENS)
    work = np.concatenate((_tile_rows(query_lens, several, num_queries), decode))
    work = _longest_first(work, query_lens, seq_lens, num_queries)
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
    max_parts = 2 * _min_items() // heads.num_kv_heads  # rows of work beyond one for each request, by `_split_tokens`
    max_split = min(num_requests, max_parts)
    num_chunks = max_split * -(-max_model_len // CHUNK_TOKENS)
    if num_slots is not None:
        num_chunks = min(num_chunks, max_split + num_slots // CHUNK_TOKENS)
    return PlanCapacity(num_requests + min(num_chunks, max_parts), max_split, num_chunks)
