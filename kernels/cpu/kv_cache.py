"""The paged KV cache on a CPU: what kernels are told of it, writes into it, and copies of its blocks.

A block's inside is laid out for the attention kernel (csrc/kv_layout.h). Nothing but these kernels may look inside.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from octavo.kernels.cpu.arguments import address, element_kind
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.ops.attention import HeadShape, copy_blocks, write_kv
from octavo.kernels.ops.kv_formats import FP8_DTYPE, kv_vector_size
from octavo.kernels.ops.rotary_kv import rotary_and_write_kv
from octavo.kernels.registry import REFERENCE, backend

MAX_HEAD_DIM = 256
_KV_KINDS = {torch.float32: 0, torch.bfloat16: 1, FP8_DTYPE: 2, torch.int8: 3}

_reference_copy_blocks = copy_blocks.implementations[REFERENCE]


class KvCacheArgs(ctypes.Structure):
    """One layer's cache (`KvCache` of csrc/kv_layout.h)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
    )


class _WriteKvArgs(ctypes.Structure):
    _fields_ = (
        ("cache", KvCacheArgs),
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("slot_mapping", ctypes.c_void_p),
        ("kv_scales", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("num_query_heads", ctypes.c_int64),
        ("num_positions", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
    )


class _CopyBlocksArgs(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p),
        ("destination", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("num_source_blocks", ctypes.c_int64),
        ("num_destination_blocks", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
    )


def kv_cache_args(
    kv_cache: torch.Tensor, head_dim: int, dtype: torch.dtype, kv_scales: torch.Tensor | None
) -> KvCacheArgs:
    """Describe one layer's cache to a kernel.

    Args:
        dtype: of queries, keys and values.

    Raises:
        ValueError: the cache does not fit `head_dim`, `dtype` or `kv_scales`, or the kernels do not take its dtype.
    """
    kind = _KV_KINDS.get(kv_cache.dtype)
    if kind is None or (kv_cache.dtype.itemsize > 1 and kv_cache.dtype is not dtype):
        raise ValueError(f"kv_cache of {kv_cache.dtype} does not fit vectors of {dtype}")
    if (kv_scales is None) is (kv_cache.dtype is FP8_DTYPE):
        raise ValueError(f"kv_scales {kv_scales} do not fit a kv_cache of {kv_cache.dtype}")
    if not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim}: the CPU kernels take sizes up to {MAX_HEAD_DIM}")
    if kv_cache.shape[4] != kv_vector_size(kv_cache.dtype, head_dim):
        raise ValueError(f"kv_cache of {kv_cache.dtype} {list(kv_cache.shape)} does not fit head_dim {head_dim}")
    return KvCacheArgs(address(kv_cache), kind, *kv_cache.shape[1:4], head_dim)


def token_stride(vectors: torch.Tensor) -> int:
    """Return the numbers from a token to the next; raises ValueError when the heads of one have gaps between them."""
    num_tokens, num_heads, head_dim = vectors.shape
    if vectors.stride(2) != 1 or (num_heads > 1 and vectors.stride(1) != head_dim):
        raise ValueError(f"vectors {list(vectors.shape)} with strides {vectors.stride()} have gaps in a token")
    return vectors.stride(0) if num_tokens > 1 else num_heads * head_dim


def _write(
    cache: KvCacheArgs, query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
) -> _WriteKvArgs:
    """Return arguments without rotary embedding."""
    if len(slot_mapping) < len(key) or slot_mapping.dtype is not torch.int64:
        raise ValueError(f"slot_mapping {slot_mapping.dtype} {list(slot_mapping.shape)} for {len(key)} tokens")
    return _WriteKvArgs(
        cache=cache,
        query=None if query is None else query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        slot_mapping=address(slot_mapping),
        query_stride=0 if query is None else token_stride(query),
        key_stride=token_stride(key),
        value_stride=token_stride(value),
        num_query_heads=0 if query is None else query.shape[1],
        is_bf16=element_kind(key.dtype),
    )


@backend("cpu", implements=write_kv)
def cpu_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    args = _write(kv_cache_args(kv_cache, key.shape[2], key.dtype, kv_scales), None, key, value, slot_mapping)
    args.kv_scales = address(kv_scales)
    EXECUTOR.run("write_kv", args, len(key))


@backend("cpu", implements=rotary_and_write_kv)
def cpu_rotary_and_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    heads: HeadShape,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    num_query_heads, num_kv_heads, head_dim = heads
    by_head = qkv.view(qkv.shape[0], -1, head_dim)
    query, key, value = by_head.split((num_query_heads, num_kv_heads, num_kv_heads), dim=1)
    args = _write(kv_cache_args(kv_cache, head_dim, qkv.dtype, kv_scales), query, key, value, slot_mapping)
    if positions.dtype is not torch.int64 or cos_sin.dtype is not torch.float32 or cos_sin.shape[1] > head_dim:
        raise ValueError(f"positions {positions.dtype}, cos_sin {cos_sin.dtype} {list(cos_sin.shape)}")
    args.kv_scales = address(kv_scales)
    args.positions, args.cos_sin = address(positions), address(cos_sin)
    args.num_positions, args.rotary_dim = cos_sin.shape
    EXECUTOR.run("write_kv", args, len(qkv))
    return query


@backend("cpu", implements=copy_blocks)
def cpu_copy_blocks(
    source_cache: torch.Tensor, destination_cache: torch.Tensor, block_pairs: Sequence[tuple[int, int]]
) -> None:
    if not block_pairs:
        return
    pairs = np.array(block_pairs, dtype=np.int64)
    is_within = source_cache.data_ptr() == destination_cache.data_ptr()
    if is_within and not set(pairs[:, 0].tolist()).isdisjoint(pairs[:, 1].tolist()):
        _reference_copy_blocks(_as_bytes(source_cache), _as_bytes(destination_cache), block_pairs)
        return
    num_layers, _, num_blocks = source_cache.shape[:3]
    args = _CopyBlocksArgs(
        address(source_cache),
        address(destination_cache),
        pairs.ctypes.data,
        num_layers * 2,
        num_blocks,
        destination_cache.shape[2],
        source_cache[0, 0, 0].nbytes,
    )
    EXECUTOR.run("copy_blocks", args, len(pairs))


def _as_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)  # torch cannot gather fp8
