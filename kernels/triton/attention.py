"""Paged attention on a GPU.

Backend "triton" has narrow tiles for requests with one query, which are bound by the memory's speed, and wide ones for
all others, which are bound by arithmetic; a step with both takes one launch for each, then one for joining the splits
of each. A request gets the same bits in any company, but not the same from a chunk as from a whole prompt.

Backend "deterministic" has one tile for all, and joins splits of the keys in one order with one arithmetic, whether
programs of their own computed them or one program did: a query gets the same bits in decode, in a chunk of any size and
in a whole prompt. That costs decode the arithmetic of rows that are not there, 15 of 16 rows with a group of 4 (which
mostly fits into the time that its keys take to arrive), and prefill the registers that hold what was joined so far, so
that its tiles are half as large. Long contexts have half as many splits, so few requests fill a device less.

Head sizes that are no power of two, such as 80 and 96, are padded to the next in registers, never in memory: nothing
more is read, which is what decode waits for; prefill multiplies zeros, a third of its work at 80 and a quarter at 96.
Rejected: tiles of 64 and of the rest, which would double each load and product of the kernel for two rare sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from octavo.kernels.ops.attention import (
    AttentionPlan,
    BlockTables,
    HeadShape,
    PlanCapacity,
    decode_plan_capacity,
    paged_attention,
    plan_attention,
)
from octavo.kernels.ops.kv_formats import FP8_DTYPE
from octavo.kernels.registry import backend
from octavo.kernels.triton.attention_kernel import attention_reduction_kernel, paged_attention_kernel
from octavo.kernels.triton.attention_plan import (
    TileShape,
    Tiling,
    decode_capacity,
    fast_tiling,
    make_plan,
    num_tile_keys,
    num_tile_rows,
    pad_head_dim,
    steady_tiling,
)

MAX_NUM_PROGRAMS = 4096  # some waves of any GPU: more would only start and end
REDUCTION_ROWS = 16
REDUCTION_STAGES = 4


class _Step(NamedTuple):
    """The arguments of `paged_attention`."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    kv_scales: torch.Tensor | None

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.query.shape[1], *self.kv_cache.shape[3:])


class _Partials(NamedTuple):
    """Room for what splits give, fp32; of each partial result the values, [.., num_query_heads, head_dim], and sums."""

    out: torch.Tensor
    log_sum: torch.Tensor


def _check(step: _Step) -> None:
    """Raise ValueError for what the kernels would silently take for something else."""
    query, kv_cache, kv_scales = step.query, step.kv_cache, step.kv_scales
    if kv_cache.dtype != (query.dtype if kv_scales is None else FP8_DTYPE):
        raise ValueError(
            f"kv_cache of {kv_cache.dtype}, query of {query.dtype}, kv_scales {kv_scales}: they do not fit"
        )
    if query.shape[1] % kv_cache.shape[3] or query.shape[2] != kv_cache.shape[4]:
        raise ValueError(f"query {tuple(query.shape)} does not fit kv_cache {tuple(kv_cache.shape)}")
    if query.stride(2) != 1 or kv_cache.stride(4) != 1:
        raise ValueError("query, kv_cache: the numbers of a vector must lie side by side")
    for name in ("scale", "window", "soft_cap"):
        value = getattr(step, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} {value}: must be above 0")


def _make_plan_of(step: _Step, tiling: Tiling) -> AttentionPlan:
    """Make the plan that the caller left out, at the price of waiting for the device."""
    query_lens, seq_lens = step.query_start_loc.diff().cpu().numpy(), step.seq_lens.cpu().numpy()
    return make_plan(query_lens, seq_lens, step.heads, step.window, tiling).to(step.query.device)


def _attend(step: _Step, out: torch.Tensor | None, plan: AttentionPlan | None, tiling: Tiling) -> torch.Tensor:
    _check(step)
    result = torch.empty_like(step.query, memory_format=torch.contiguous_format) if out is None else out
    if plan is None:
        plan = _make_plan_of(step, tiling)
    num_query_heads, head_dim = step.query.shape[1:]
    partials = _Partials(
        step.query.new_empty((plan.num_partials, num_query_heads, head_dim), dtype=torch.float32),
        step.query.new_empty((plan.num_partials, num_query_heads), dtype=torch.float32),
    )
    num_work, num_reductions = plan.num_wide_work, plan.num_wide_reductions
    if tiling.wide is not None:
        _launch(step, result, partials, plan.work[:num_work], tiling.wide, merges=False)
        _launch_reduction(step, result, partials, plan.reductions[:num_reductions], tiling.wide)
    _launch(step, result, partials, plan.work[num_work:], tiling.narrow, merges=tiling.wide is None)
    _launch_reduction(step, result, partials, plan.reductions[num_reductions:], tiling.narrow)
    return result


def _launch(
    step: _Step, out: torch.Tensor, partials: _Partials, work: torch.Tensor, tile: TileShape, merges: bool
) -> None:
    if not len(work):
        return
    num_query_heads, num_kv_heads, head_dim = step.heads
    group = num_query_heads // num_kv_heads
    num_workers = min(len(work), max(1, MAX_NUM_PROGRAMS // num_kv_heads))
    kv_cache = step.kv_cache if step.kv_scales is None else step.kv_cache.view(torch.uint8)
    paged_attention_kernel[(num_workers * num_kv_heads,)](
        out,
        *partials,
        step.query,
        kv_cache,
        work,
        step.query_start_loc,
        step.seq_lens,
        step.block_tables,
        step.kv_scales,
        step.scale,
        1.0 if step.soft_cap is None else step.soft_cap,
        0 if step.window is None else step.window,
        len(work),
        *out.stride()[:2],
        *step.query.stride()[:2],
        *kv_cache.stride()[:4],
        step.block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_HEAD_DIM=pad_head_dim(head_dim),
        BLOCK_SIZE=kv_cache.shape[2],
        TILE_ROWS=num_tile_rows(tile, group),
        TILE_KEYS=num_tile_keys(tile, step.query.element_size()),
        SPLIT_KEYS=tile.split_keys,
        HAS_WINDOW=step.window is not None,
        HAS_SOFT_CAP=step.soft_cap is not None,
        MERGES=merges,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _launch_reduction(
    step: _Step, out: torch.Tensor, partials: _Partials, reductions: torch.Tensor, tile: TileShape
) -> None:
    if not len(reductions):
        return
    num_query_heads, num_kv_heads, head_dim = step.heads
    group = num_query_heads // num_kv_heads
    num_rows = num_tile_rows(tile, group)
    attention_reduction_kernel[(len(reductions) * num_kv_heads * (num_rows // REDUCTION_ROWS),)](
        out,
        *partials,
        reductions,
        step.query_start_loc,
        *out.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_HEAD_DIM=pad_head_dim(head_dim),
        TILE_ROWS=num_rows,
        PART_ROWS=REDUCTION_ROWS,
        NUM_STAGES=REDUCTION_STAGES,
    )


class _Implementations(NamedTuple):
    """What one backend runs for the three ops of attention."""

    plan_attention: Callable[..., AttentionPlan | None]
    decode_plan_capacity: Callable[..., PlanCapacity]
    paged_attention: Callable[..., torch.Tensor]


def _implement(name: str, tiling_of: Callable[[int], Tiling]) -> _Implementations:
    """Register the three ops as backend `name`, with tiles by `tiling_of` the head's size."""

    @backend(name, implements=plan_attention)
    def plan(
        query_lens: np.ndarray,
        seq_lens: np.ndarray,
        heads: HeadShape,
        window: int | None = None,
        tables: BlockTables | None = None,
    ) -> AttentionPlan | None:
        return make_plan(query_lens, seq_lens, heads, window, tiling_of(heads.head_dim))

    @backend(name, implements=decode_plan_capacity)
    def capacity(num_requests: int, max_model_len: int, heads: HeadShape, num_slots: int | None = None) -> PlanCapacity:
        return decode_capacity(num_requests, max_model_len, num_slots, tiling_of(heads.head_dim).narrow.split_keys)

    @backend(name, implements=paged_attention)
    def attend(
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
        step = _Step(query, kv_cache, query_start_loc, seq_lens, block_tables, scale, window, soft_cap, kv_scales)
        return _attend(step, out, plan, tiling_of(query.shape[2]))

    return _Implementations(plan, capacity, attend)


triton_plan_attention, triton_decode_plan_capacity, triton_paged_attention = _implement("triton", fast_tiling)
deterministic_plan_attention, deterministic_decode_plan_capacity, deterministic_paged_attention = _implement(
    "deterministic", steady_tiling
)
