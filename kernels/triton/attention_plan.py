"""Which tiles compute a step's attention, and the list of work that the kernels follow.

A plan is made on the host once a step, for all layers, from lengths that the host knows. How a request's queries are
cut into tiles and its keys into splits follows from its own lengths and from constants, never from the other requests
of the step, so that neither does its result. Splits are at fixed multiples of tokens from the request's start.
Rejected: as many splits as fill the device (another batch would give another result), and equal splits of the length at
hand (every token would move all of them).

A work row is (request, first query, split, partial result): the tile of queries from the first one on, against one
split of the keys, whose result goes to consecutive partial results, one for each query. Partial result -1 means:
against all keys from that split on, and the result goes out. A reduction row is (request, first query, first partial
result, number of splits).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from triton.language.target_info import current_target

from octavo.kernels.ops.attention import AttentionPlan, HeadShape, PlanCapacity

MAX_SPLIT_TILES = 4  # requests of more tiles keep a device busy without splits, and would need much room for partials


class TileShape(NamedTuple):
    """How one launch works.

    Attributes:
        num_rows: rows of the tile of queries, at least; a row is one query of one head.
        num_keys: keys at a time, see `num_tile_keys`.
        split_keys: tokens of a split of the keys, a multiple of `num_keys`.
        num_warps: of a program.
        num_stages: of the pipeline that loads keys and values.
    """

    num_rows: int
    num_keys: int
    split_keys: int
    num_warps: int
    num_stages: int


class Tiling(NamedTuple):
    """The tiles of a layer: narrow for requests with one query, wide for all others; None: narrow for all."""

    narrow: TileShape
    wide: TileShape | None


class DeviceTiles(NamedTuple):
    """The tiles of one kind of GPU, by head size padded to a power of two.

    A narrow tile streams keys: few rows, and loads enough bytes at a time. A wide one is bound by arithmetic: as many
    rows and keys as registers hold without any in memory, which the ahead-of-time checks see to. A steady tile is for
    all requests, so it is between the two, and holds its sums twice. Shared memory is below 99 KiB, which all NVIDIA
    GPUs from compute capability 8.0 on have, and below 64 KiB on AMD.
    """

    narrow: dict[int, TileShape]
    wide: dict[int, TileShape]
    steady: dict[int, TileShape]


HOPPER = DeviceTiles(
    narrow={64: TileShape(16, 64, 512, 4, 3), 128: TileShape(16, 64, 512, 4, 3), 256: TileShape(16, 32, 512, 4, 3)},
    wide={64: TileShape(128, 64, 4096, 8, 3), 128: TileShape(128, 64, 4096, 8, 2), 256: TileShape(64, 32, 4096, 8, 2)},
    steady={64: TileShape(64, 32, 1024, 4, 2), 128: TileShape(64, 64, 1024, 8, 2), 256: TileShape(32, 32, 1024, 8, 2)},
)
AMPERE = HOPPER._replace(
    wide={64: TileShape(128, 32, 4096, 8, 2), 128: TileShape(128, 32, 4096, 8, 2), 256: TileShape(64, 16, 4096, 8, 2)},
)
AMD = HOPPER._replace(
    wide={64: TileShape(64, 64, 4096, 4, 2), 128: TileShape(64, 64, 4096, 4, 1), 256: TileShape(64, 32, 4096, 4, 1)},
    steady={64: TileShape(64, 32, 1024, 4, 2), 128: TileShape(64, 32, 1024, 4, 2), 256: TileShape(32, 16, 1024, 4, 2)},
)


def pad_head_dim(head_dim: int) -> int:
    """Return the size of a tile's head dimension: the power of two from 64 to 256 that is not below `head_dim`.

    Raises ValueError for sizes above 256.
    """
    if head_dim > 256:
        raise ValueError(f"head_dim {head_dim}: the attention kernels take sizes up to 256")
    return max(64, 1 << (head_dim - 1).bit_length())


def num_tile_rows(tile: TileShape, group: int) -> int:
    """Return the rows of `tile` for `group` query heads to a KV head: room for at least one query."""
    return max(tile.num_rows, 1 << (group - 1).bit_length())


def _device_tiles() -> DeviceTiles:
    """Return the tiles of the GPU that Triton compiles for; where it interprets there is none."""
    target = current_target()
    if target is None or (target.backend == "cuda" and target.arch >= 90):
        return HOPPER
    return AMPERE if target.backend == "cuda" else AMD


def fast_tiling(head_dim: int) -> Tiling:
    """Return the tiles that are fastest on the GPU at hand."""
    tiles, padded_head_dim = _device_tiles(), pad_head_dim(head_dim)
    return Tiling(tiles.narrow[padded_head_dim], tiles.wide[padded_head_dim])


def steady_tiling(head_dim: int) -> Tiling:
    """Return the tiling in which a query's result does not depend on how many queries are computed with it."""
    return Tiling(_device_tiles().steady[pad_head_dim(head_dim)], None)


def num_tile_keys(tile: TileShape, query_itemsize: int) -> int:
    """Return the keys of `tile`: at 4 bytes fewer, because exact products take more registers, but 16 at least."""
    return tile.num_keys if query_itemsize <= 2 else max(16, tile.num_keys // 4)


class _Tiles(NamedTuple):
    """Tiles of queries, [num_tiles] each; `num_splits` is 1 for a tile that takes all its keys by itself."""

    request: np.ndarray
    first_query: np.ndarray
    num_queries: np.ndarray
    first_split: np.ndarray
    num_splits: np.ndarray


def _count_splits(
    first_position: np.ndarray, num_queries: np.ndarray, split_keys: int, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first split that queries at consecutive positions see, and how many they see."""
    end_split = (first_position + num_queries + (split_keys - 1)) // split_keys
    if window is None:
        return np.zeros_like(end_split), end_split
    first_split = np.maximum(first_position - (window - 1), 0) // split_keys
    return first_split, end_split - first_split


def _cut(
    query_lens: np.ndarray, seq_lens: np.ndarray, requests: np.ndarray, tile: TileShape, group: int, window: int | None
) -> _Tiles:
    """Cut the queries of `requests` into tiles."""
    query_lens, seq_lens = query_lens[requests], seq_lens[requests]
    max_queries = num_tile_rows(tile, group) // group
    num_tiles = -(-query_lens // max_queries)
    owner = np.repeat(np.arange(len(requests)), num_tiles)
    first_query = (np.arange(len(owner)) - (np.cumsum(num_tiles) - num_tiles)[owner]) * max_queries
    num_queries = np.minimum(query_lens[owner] - first_query, max_queries)
    first_position = (seq_lens - query_lens)[owner] + first_query
    first_split, num_splits = _count_splits(first_position, num_queries, tile.split_keys, window)
    num_splits[num_tiles[owner] > MAX_SPLIT_TILES] = 1
    longest_first = np.argsort(-first_position, kind="stable")  # no program begins the longest when others are done
    tiles = _Tiles(requests[owner], first_query, num_queries, first_split, num_splits)
    return _Tiles(*(column[longest_first] for column in tiles))


def _cut_single_queries(seq_lens: np.ndarray, requests: np.ndarray, tile: TileShape, window: int | None) -> _Tiles:
    """Do what `_cut` does for requests of one query each, as most steps have them, in a third of the time."""
    ones = np.ones_like(requests)
    first_split, num_splits = _count_splits(seq_lens[requests] - 1, ones, tile.split_keys, window)
    return _Tiles(requests, np.zeros_like(requests), ones, first_split, num_splits)


def _lay_out(tiles: _Tiles, first_partial: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the work rows and the reduction rows of `tiles`, and the first partial result that they leave free."""
    is_split = tiles.num_splits > 1
    num_partials = tiles.num_splits * tiles.num_queries * is_split
    partials = first_partial + np.cumsum(num_partials) - num_partials
    first_row = np.cumsum(tiles.num_splits) - tiles.num_splits
    table = np.empty((len(is_split), 5), dtype=np.int32)
    table[:, 0] = tiles.request
    table[:, 1] = tiles.first_query
    table[:, 2] = tiles.first_split - first_row  # the number of the row will be added
    table[:, 3] = np.where(is_split, partials, -1) - first_row * tiles.num_queries
    table[:, 4] = tiles.num_queries
    work = np.repeat(table, tiles.num_splits, axis=0)
    row = np.arange(len(work), dtype=np.int32)
    work[:, 2] += row
    work[:, 3] += row * work[:, 4]
    table[:, 2] = partials
    table[:, 3] = tiles.num_splits
    reductions = table[is_split, :4]
    return work[:, :4].copy(), reductions, first_partial + int(num_partials.sum())


def make_plan(
    query_lens: np.ndarray, seq_lens: np.ndarray, heads: HeadShape, window: int | None, tiling: Tiling
) -> AttentionPlan:
    """Return the plan of a step for `tiling`; the other arguments are those of `plan_attention`."""
    group = heads.num_query_heads // heads.num_kv_heads
    single, several = np.flatnonzero(query_lens == 1), np.flatnonzero(query_lens > 1)
    tiles = _cut_single_queries(seq_lens, single, tiling.narrow, window)
    if not len(several):
        work, reductions, num_partials = _lay_out(tiles, 0)
        return AttentionPlan(torch.from_numpy(work), torch.from_numpy(reductions), num_partials, 0, 0)
    wide_tiles = _cut(query_lens, seq_lens, several, tiling.wide or tiling.narrow, group, window)
    wide_work, wide_reductions, num_partials = _lay_out(wide_tiles, 0)
    work, reductions, num_partials = _lay_out(tiles, num_partials)
    return AttentionPlan(
        torch.from_numpy(np.concatenate((wide_work, work))),
        torch.from_numpy(np.concatenate((wide_reductions, reductions))),
        num_partials,
        num_wide_work=len(wide_work) if tiling.wide else 0,
        num_wide_reductions=len(wide_reductions) if tiling.wide else 0,
    )


def decode_capacity(num_requests: int, max_model_len: int, num_slots: int | None, split_keys: int) -> PlanCapacity:
    """Return the capacity for one query of each request; the arguments are those of `decode_plan_capacity`."""
    max_splits = -(-max_model_len // split_keys)
    num_work = num_requests * max_splits
    if num_slots is not None:
        num_work = min(num_work, num_requests + num_slots // split_keys)
    if max_splits <= 1:
        return PlanCapacity(num_work, 0, 0)
    return PlanCapacity(num_work, num_requests, num_work)
