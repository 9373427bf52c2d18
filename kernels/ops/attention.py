"""Attention over the paged KV cache, and the writes into it.

What a query gets depends on its request alone: not on the other requests of the step, on how the prompt was cut into
chunks, on the block size, or on which blocks hold the keys; to the bit on the CPUs that `linear` names. For that, keys
are taken in tiles of fixed size from the request's start, each tile's sums have one shape and order, and tiles are
joined in order by the online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). Keys that a query
may not see add exact zeros. Only slots with valid KV are read, so that what lies in unused slots, NaN included, cannot
matter. Rejected: one product over a request's whole length (another length is another order of summation), and
torch's `scaled_dot_product_attention` (picks its algorithm by shape).

A cache may hold 8-bit numbers (see `kv_formats`). Backends follow a plan that the host makes once a step for all
layers; what a plan holds is theirs to say. So is how the numbers of one block of keys, or of values, lie inside it:
only whole blocks are ever copied. The order of a cache's last three dimensions is that of this reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from octavo.kernels.ops.kv_formats import from_int8, to_fp8, to_int8
from octavo.kernels.registry import op

KEY_TILE = 128  # tokens; 64 costs more calls, 256 more padding
QUERY_TILE = 128  # tokens; bounds the scores of a long prompt to num_query_heads · 128 · 128 numbers


class HeadShape(NamedTuple):
    """The heads of one layer on this rank."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int


class AttentionPlan(NamedTuple):
    """The work of one step's attention, the same for every layer of a window.

    The backend that made a plan says what its rows mean. A row of -1 is padding; padding comes last.

    Attributes:
        work: int32 [W, 4], what the programs of the attention kernel do.
        reductions: int32 [R, 4], which partial results belong together.
        num_partials: how many partial results there are room for.
        num_wide_work: how many rows of `work`, the first ones, are for wide tiles of many queries. 0 for decode.
        num_wide_reductions: the same for `reductions`.
    """

    work: torch.Tensor
    reductions: torch.Tensor
    num_partials: int
    num_wide_work: int
    num_wide_reductions: int

    def to(self, device: torch.device | str) -> AttentionPlan:
        """Return the plan with its rows on `device`."""
        return self._replace(work=self.work.to(device), reductions=self.reductions.to(device))


class BlockTables(NamedTuple):
    """Where the keys of a step's requests are: int32 [num_requests, ...] on the host, what is unused is anything."""

    block_ids: np.ndarray
    block_size: int


class PlanCapacity(NamedTuple):
    """The most that a plan of some size can hold: rows of work, rows of reductions, partial results."""

    num_work: int
    num_reductions: int
    num_partials: int


@op
def plan_attention(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    heads: HeadShape,
    window: int | None = None,
    tables: BlockTables | None = None,
) -> AttentionPlan | None:
    """Cut a step's attention into work of equal size, on the host, from host numbers alone.

    Args:
        query_lens: int32 [num_requests], queries of each request; 0 leaves it out.
        seq_lens: int32 [num_requests], tokens of each request with valid KV, this step's among them.
        heads: of the layers that will follow the plan.
        window: of these layers. A plan made without one serves layers with any window, at some empty work.
        tables: with them, a backend may find the requests that have keys in the same blocks, and read those once.

    Returns:
        CPU tensors, or None from a backend that needs no plan, such as this reference.
    """
    return None


@op
def decode_plan_capacity(
    num_requests: int, max_model_len: int, heads: HeadShape, num_slots: int | None = None
) -> PlanCapacity:
    """Say how large the plan of a step of one query for each of `num_requests` requests can be.

    Args:
        max_model_len: the most tokens of a request.
        heads: as for `plan_attention`.
        num_slots: of the KV cache; bounds the tokens of all requests together. A step whose requests share blocks can
            need more than this capacity, and then has to run without a graph. None bounds by `max_model_len` alone.

    Returns:
        Zeros from a backend that needs no plan.
    """
    return PlanCapacity(0, 0, 0)


@op
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Store each token's key and value in its slot.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], in the cache's dtype unless that is fp8 or int8.
        value: the same.
        kv_cache: one layer's, [2, num_blocks, block_size, num_kv_heads, head_dim]; written. An int8 one holds each
            vector's scale behind its codes, and its last dimension is head_dim + 4.
        slot_mapping: int64 [num_tokens], block_id · block_size + offset; no slot twice. The tokens of slot -1, which
            pad the batch of a graph, are left out.
        kv_scales: fp32 [2], of keys and of values, for an fp8 cache: what is stored is the nearest e4m3 number to
            value / scale, and never above 448 in size.

    Raises:
        IndexError: a slot is outside the cache.
    """
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        is_kept = slot_mapping != -1
        key, value, slot_mapping = key[is_kept], value[is_kept], slot_mapping[is_kept]
    slots = kv_cache.view(2, -1, *kv_cache.shape[3:])
    if kv_scales is not None:
        key, value = to_fp8(key, kv_scales[0]).view(torch.uint8), to_fp8(value, kv_scales[1]).view(torch.uint8)
        slots = slots.view(torch.uint8)
    elif kv_cache.dtype is torch.int8:
        key, value = to_int8(key), to_int8(value)
    slots[0].index_copy_(0, slot_mapping, key)
    slots[1].index_copy_(0, slot_mapping, value)


@op
def copy_blocks(
    source_cache: torch.Tensor, destination_cache: torch.Tensor, block_pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy whole blocks, over all layers.

    Args:
        source_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].
        destination_cache: the same but for num_blocks; may be the same tensor, or on another device; written.
        block_pairs: (source block id, destination block id); no destination twice. Every source is read before any
            destination is written.
    """
    if not block_pairs:
        return
    sources, destinations = torch.tensor(block_pairs, dtype=torch.int64).unbind(1)
    blocks = source_cache.index_select(2, sources.to(source_cache.device))
    destination_cache.index_copy_(2, destinations.to(destination_cache.device), blocks.to(destination_cache.device))


class _QueryTile(NamedTuple):
    """Queries computed together: as many of each of some requests, at consecutive positions of it.

    Attributes:
        tokens: int64 [num_rows, num_queries], where the queries are among the step's tokens.
        positions: int64 [num_rows, num_queries], where they are in their requests; rows by descending last position.
        block_tables: int32 [num_rows, max_blocks].
        last_positions: the last position of each row, on the host.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    block_tables: torch.Tensor
    last_positions: list[int]


def _query_tiles(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor
) -> Iterator[_QueryTile]:
    """All requests with one query as one tile, because most are such; every other request in tiles of its own."""
    device = block_tables.device
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    query_lens = [end - start for start, end in pairwise(starts)]
    single = sorted((row for row, query_len in enumerate(query_lens) if query_len == 1), key=lambda row: -lens[row])
    if single:
        rows = torch.tensor(single, device=device)
        positions = seq_lens[rows].long()[:, None] - 1
        last_positions = [lens[row] - 1 for row in single]
        yield _QueryTile(query_start_loc[rows].long()[:, None], positions, block_tables[rows], last_positions)
    for row, query_len in enumerate(query_lens):
        for first in range(0, query_len if query_len > 1 else 0, QUERY_TILE):
            offsets = torch.arange(first, min(first + QUERY_TILE, query_len), device=device)[None]
            positions = offsets + (lens[row] - query_len)
            last_position = lens[row] - query_len + first + offsets.shape[1] - 1
            yield _QueryTile(offsets + starts[row], positions, block_tables[row : row + 1], [last_position])


def _first_positions(tile: _QueryTile, window: int | None) -> list[int]:
    """Return for each row the first position that any of its queries sees."""
    if window is None:
        return [0] * len(tile.last_positions)
    reach = tile.positions.shape[1] - 1 + window - 1
    return [max(0, last_position - reach) for last_position in tile.last_positions]


def _readable_slots(tile: _QueryTile, first_key: int, block_size: int, window: int | None) -> torch.Tensor:
    """Return int64 [num_rows, whole key tiles from `first_key`]: the slots of a request in order.

    Before the first position that a row may read stands that position's slot, and after its last one that one's.
    """
    num_keys = -(-(tile.last_positions[0] + 1) // KEY_TILE) * KEY_TILE
    positions = torch.arange(first_key, num_keys, device=tile.positions.device).minimum(tile.positions[:, -1:])
    if window is not None:
        positions = positions.maximum((tile.positions[:, :1] - (window - 1)).clamp_(min=0))
    return tile.block_tables.gather(1, positions // block_size).long() * block_size + positions % block_size


def _gather(
    kv_cache: torch.Tensor, slots: torch.Tensor, kv_scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 keys and values, [num_rows · num_kv_heads, KEY_TILE, head_dim], of slots [num_rows, KEY_TILE]."""
    num_kv_heads, vector_size = kv_cache.shape[3:]
    vectors = (slots[:, None] * num_kv_heads + torch.arange(num_kv_heads, device=slots.device)[:, None]).flatten()
    keys, values = (part.view(-1, vector_size).index_select(0, vectors) for part in kv_cache)
    if kv_cache.dtype is torch.int8:
        keys, values = from_int8(keys), from_int8(values)
    keys, values = (part.float().view(len(slots) * num_kv_heads, KEY_TILE, -1) for part in (keys, values))
    if kv_scales is not None:
        keys, values = keys.mul_(kv_scales[0]), values.mul_(kv_scales[1])
    return keys, values


class _Options(NamedTuple):
    """What a layer may have beyond plain causal attention; see `paged_attention`."""

    window: int | None
    soft_cap: float | None
    kv_scales: torch.Tensor | None


def _hide(scores: torch.Tensor, key_positions: torch.Tensor, positions: torch.Tensor, window: int | None) -> None:
    """Set to -inf, in scores [..., num_queries, KEY_TILE], the keys that the queries at `positions` may not see."""
    is_hidden = key_positions > positions
    if window is not None:
        is_hidden |= key_positions <= positions - window
    scores.masked_fill_(is_hidden, -torch.inf)


def _attend(query: torch.Tensor, tile: _QueryTile, kv_cache: torch.Tensor, options: _Options) -> torch.Tensor:
    """Attend from fp32, scaled [num_rows · num_kv_heads, group · num_queries, head_dim]; return the same shape.

    The operands of both products stand as they do because this way round a row's bits were found not to depend on the
    number of rows (MKL on x86); the other way round they did.
    """
    num_kv_heads = kv_cache.shape[3]
    query_positions = tile.positions.repeat(1, query.shape[1] // tile.positions.shape[1])[:, None, :, None]
    first_positions = _first_positions(tile, options.window)
    start = first_positions[-1] // KEY_TILE * KEY_TILE
    slots = _readable_slots(tile, start, kv_cache.shape[2], options.window)
    maximum = query.new_full((*query.shape[:2], 1), torch.finfo(torch.float32).min)
    total, result = torch.zeros_like(maximum), torch.zeros_like(query)
    for first_key in range(start, start + slots.shape[1], KEY_TILE):
        first_row = sum(first_position >= first_key + KEY_TILE for first_position in first_positions)
        end_row = sum(last_position >= first_key for last_position in tile.last_positions)
        rows, active = slice(first_row, end_row), slice(first_row * num_kv_heads, end_row * num_kv_heads)
        tile_slots = slots[rows, first_key - start : first_key - start + KEY_TILE]
        keys, values = _gather(kv_cache, tile_slots, options.kv_scales)
        scores = torch.bmm(keys, query[active].transpose(1, 2)).transpose(1, 2).contiguous()
        if options.soft_cap is not None:
            scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
        key_positions = torch.arange(first_key, first_key + KEY_TILE, device=query.device)
        by_row = scores.view(end_row - first_row, num_kv_heads, -1, KEY_TILE)
        _hide(by_row, key_positions, query_positions[rows], options.window)

        new_maximum = torch.maximum(maximum[active], scores.amax(-1, keepdim=True))
        decay = (maximum[active] - new_maximum).exp_()
        weights = scores.sub_(new_maximum).exp_()
        weighted = torch.bmm(values.transpose(1, 2), weights.transpose(1, 2)).transpose(1, 2)
        maximum[active] = new_maximum
        total[active].mul_(decay).add_(weights.sum(-1, keepdim=True))
        result[active].mul_(decay).add_(weighted)
    return result.div_(total)


@op
def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Causal attention of every query over its request's keys and values; prefill and decode in one call.

    Query i of a request with q queries and s tokens is at position s - q + i, and sees positions up to its own. Scores,
    softmax and sums are fp32.

    Args:
        query: [num_tokens, num_query_heads, head_dim]; query heads j · group up to (j + 1) · group share KV head j.
        kv_cache: one layer's, keys then values; see `write_kv`.
        query_start_loc: int32 [num_requests + 1], where each request's queries begin; the last is num_tokens.
        seq_lens: int32 [num_requests], tokens with valid KV, this step's among them.
        block_tables: int32 [num_requests, max_blocks]; entries past a request's tokens are not read.
        scale: factor of the scores, above 0.
        out: receives the result when given, of the shape and dtype of `query`.
        window: a query at position p sees only positions above p - window; None sees all up to its own. Slots outside
            are not read.
        soft_cap: scores become soft_cap · tanh(scores / soft_cap) (Gemma 2, 2024); None leaves them.
        kv_scales: fp32 [2], of keys and of values, for an fp8 cache: a number read is the stored one times its scale.
        plan: of `plan_attention` for this step, on the device. A backend that needs a plan makes one when it is None.

    Returns:
        [num_tokens, num_query_heads, head_dim], in the dtype of `query`.
    """
    result = torch.empty_like(query) if out is None else out
    num_kv_heads, head_dim = kv_cache.shape[3], query.shape[2]
    group = query.shape[1] // num_kv_heads
    options = _Options(window, soft_cap, kv_scales)
    for tile in _query_tiles(query_start_loc, seq_lens, block_tables):
        num_rows, num_queries = tile.tokens.shape
        queries = (query[tile.tokens].float() * scale).view(num_rows, num_queries, num_kv_heads, group, head_dim)
        rows = queries.permute(0, 2, 3, 1, 4).reshape(num_rows * num_kv_heads, group * num_queries, head_dim)
        attended = _attend(rows, tile, kv_cache, options).view(num_rows, num_kv_heads, group, num_queries, head_dim)
        result[tile.tokens] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype)
    return result
