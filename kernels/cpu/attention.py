"""Paged attention on a CPU; see csrc/attention.cpp for how, and `attention_plan` for how a step is shared out."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from octavo.kernels.cpu.arguments import address, element_kind
from octavo.kernels.cpu.attention_plan import make_plan, max_item_queries, plan_capacity
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.cpu.kv_cache import KvCacheArgs, kv_cache_args, token_stride
from octavo.kernels.ops.attention import (
    AttentionPlan,
    BlockTables,
    HeadShape,
    PlanCapacity,
    decode_plan_capacity,
    paged_attention,
    plan_attention,
)
from octavo.kernels.registry import backend

LANES = 16


class _AttentionArgs(ctypes.Structure):
    _fields_ = (
        ("cache", KvCacheArgs),
        ("query", ctypes.c_void_p),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("kv_scales", ctypes.c_void_p),
        ("work", ctypes.c_void_p),
        ("reductions", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("block_table_stride", ctypes.c_int64),
        ("num_work", ctypes.c_int64),
        ("num_reductions", ctypes.c_int64),
        ("max_item_queries", ctypes.c_int64),
        ("num_query_heads", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


@backend("cpu", implements=plan_attention)
def cpu_plan_attention(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    heads: HeadShape,
    window: int | None = None,
    tables: BlockTables | None = None,
) -> AttentionPlan | None:
    return make_plan(query_lens, seq_lens, heads, tables)


@backend("cpu", implements=decode_plan_capacity)
def cpu_decode_plan_capacity(
    num_requests: int, max_model_len: int, heads: HeadShape, num_slots: int | None = None
) -> PlanCapacity:
    return plan_capacity(num_requests, max_model_len, heads, num_slots)


def _check(query: torch.Tensor, num_kv_heads: int, block_tables: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError for what the kernel would silently take for something else."""
    if query.shape[1] % num_kv_heads:
        raise ValueError(f"query has {query.shape[1]} heads, not a multiple of {num_kv_heads}")
    if block_tables.dtype is not torch.int32 or block_tables.stride(1) != 1:
        raise ValueError(f"block_tables of {block_tables.dtype} with strides {block_tables.stride()}")
    if out.dtype is not query.dtype or out.shape != query.shape:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, query {query.dtype} {list(query.shape)}")


def _int32_address(name: str, tensor: torch.Tensor) -> int | None:
    if tensor.dtype is not torch.int32:
        raise ValueError(f"{name} of {tensor.dtype}, not int32")
    return address(tensor)


@backend("cpu", implements=paged_attention)
def cpu_paged_attention(
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
    num_tokens, num_query_heads, head_dim = query.shape
    cache = kv_cache_args(kv_cache, head_dim, query.dtype, kv_scales)
    heads = HeadShape(num_query_heads, kv_cache.shape[3], head_dim)
    result = EXECUTOR.empty(tuple(query.shape), query.dtype) if out is None else out
    _check(query, heads.num_kv_heads, block_tables, result)
    if scale <= 0 or (window is not None and window <= 0) or (soft_cap is not None and soft_cap <= 0):
        raise ValueError(f"scale {scale}, window {window}, soft_cap {soft_cap}: must be above 0")
    if plan is None:
        plan = make_plan(np.diff(query_start_loc.numpy()), seq_lens.numpy(), heads)
    partial_size = -(-head_dim // LANES) * LANES + LANES
    partials = EXECUTOR.empty((plan.num_partials, num_query_heads, partial_size), torch.float32)
    args = _AttentionArgs(
        cache=cache,
        query=query.data_ptr(),
        query_start_loc=_int32_address("query_start_loc", query_start_loc),
        seq_lens=_int32_address("seq_lens", seq_lens),
        block_tables=block_tables.data_ptr(),
        kv_scales=address(kv_scales),
        work=_int32_address("plan.work", plan.work),
        reductions=_int32_address("plan.reductions", plan.reductions),
        partials=address(partials),
        out=address(result),
        query_stride=token_stride(query),
        block_table_stride=block_tables.stride(0),
        num_work=len(plan.work),
        num_reductions=len(plan.reductions),
        max_item_queries=max_item_queries(heads),
        num_query_heads=num_query_heads,
        window=window or 0,
        is_bf16=element_kind(query.dtype),
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )
    EXECUTOR.run("paged_attention", args, num_tokens)
    return result
