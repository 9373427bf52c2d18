"""Made-up steps of attention in poisoned paged memory, and what float64 says about them.

Every slot that a kernel has no business reading is NaN: of blocks that nobody holds, past a request's length, and
before the window of the first query of a request. Entries of block tables past a request's blocks are absurd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.kernels.ops.attention import HeadShape
from octavo.kernels.ops.kv_formats import FP8_DTYPE

FP8_SCALES = (0.021, 0.013)  # of keys and of values about 1 in size: their largest are about 200 in the cache


class Case(NamedTuple):
    """One step: the queries and keys of each request, how memory is cut, and what the layer is like."""

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 8
    block_size: int = 16
    is_first_block_shared: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0
    window: int | None = None
    soft_cap: float | None = None
    is_fp8: bool = False

    @property
    def seq_lens(self) -> list[int]:
        return [query + context for query, context in zip(self.query_lens, self.context_lens, strict=True)]

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.num_kv_heads * self.group, self.num_kv_heads, self.head_dim)


class Step(NamedTuple):
    """The arguments of paged_attention but for the scale."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


class Options(NamedTuple):
    """The keyword arguments of paged_attention but for the plan."""

    window: int | None
    soft_cap: float | None
    kv_scales: torch.Tensor | None


PLAIN = Options(None, None, None)


def options_of(case: Case) -> Options:
    return Options(case.window, case.soft_cap, torch.tensor(FP8_SCALES) if case.is_fp8 else None)


def _fill(kv_cache: torch.Tensor, slots: torch.Tensor, vectors: torch.Tensor, is_fp8: bool) -> None:
    """Store vectors [2, num_slots, num_kv_heads, head_dim] at `slots`."""
    if is_fp8:
        vectors = vectors / torch.tensor(FP8_SCALES)[:, None, None, None]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kv_cache.element_size()]  # fp8 cannot be indexed
    kv_cache.view(bits).view(2, -1, *kv_cache.shape[3:])[:, slots] = vectors.to(kv_cache.dtype).view(bits)


def build(case: Case) -> Step:
    """Lay the requests out in blocks of shuffled ids."""
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
    kv_cache = torch.full(shape, torch.nan).to(FP8_DTYPE if case.is_fp8 else case.dtype)
    max_blocks = max(num_blocks, default=0) + 1
    block_tables = torch.full((len(tables), max_blocks), 2**31 - 1, dtype=torch.int32)  # never to be read
    for row, (table, seq_len) in enumerate(zip(tables, case.seq_lens, strict=True)):
        block_tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        tokens = torch.arange(seq_len)
        slots = block_tables[row, tokens // case.block_size].long() * case.block_size + tokens % case.block_size
        vectors = torch.randn(seq_len, 2, case.num_kv_heads, case.head_dim, generator=generator).transpose(0, 1)
        first_seen = 0 if case.window is None else max(0, seq_len - case.query_lens[row] - case.window + 1)
        _fill(kv_cache, slots[first_seen:], vectors[:, first_seen:], case.is_fp8)
    query_shape = (sum(case.query_lens), case.num_kv_heads * case.group, case.head_dim)
    query = torch.randn(query_shape, generator=generator).to(case.dtype)
    starts = torch.tensor([0, *case.query_lens]).cumsum(0).int()
    return Step(query, kv_cache, starts, torch.tensor(case.seq_lens, dtype=torch.int32), block_tables)


def naive_attention(step: Step, scale: float, options: Options = PLAIN) -> torch.Tensor:
    """Every query by itself in float64, over its request's slots looked up one by one."""
    query, kv_cache = step.query.double(), step.kv_cache.float().double()
    if options.kv_scales is not None:
        kv_cache = kv_cache * options.kv_scales.double()[:, None, None, None, None]
    block_size, group = kv_cache.shape[2], query.shape[1] // kv_cache.shape[3]
    result = torch.zeros_like(query)
    for row, seq_len in enumerate(step.seq_lens.tolist()):
        first, last = step.query_start_loc[row : row + 2].tolist()
        slots = [
            int(step.block_tables[row, token // block_size]) * block_size + token % block_size
            for token in range(seq_len)
        ]
        vectors = kv_cache.flatten(1, 2)[:, slots].repeat_interleave(group, 2)
        for token in range(first, last):
            end = seq_len - (last - 1 - token)
            keys, values = vectors[:, 0 if options.window is None else max(0, end - options.window) : end]
            scores = torch.einsum("hd,khd->hk", query[token], keys) * scale
            if options.soft_cap is not None:
                scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
            result[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), values)
    return result
