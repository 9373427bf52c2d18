"""Writes into the paged KV cache and copies of its blocks, on a GPU.

A write is one program for each token. A copy is one launch for many blocks and all layers: on the device, and between
the device and pinned host memory, which the kernel reads and writes where it is; a copy engine would need a call for
each layer and block. Copies of a launch run in any order, so those that depend on each other are in launches of their
own, in an order in which every block is read before it is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from octavo.kernels.ops.attention import copy_blocks, write_kv
from octavo.kernels.ops.kv_formats import FP8_DTYPE
from octavo.kernels.registry import backend
from octavo.kernels.triton.kv_fp8 import encode_fp8

COPY_TILE = 2048  # words of 4 bytes for each program

Pairs = Sequence[tuple[int, int]]


@triton.jit
def write_kv_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, head_dim]
    value_ptr,
    kv_cache_ptr,  # [2, num_blocks, block_size, num_kv_heads, head_dim]; uint8 for fp8
    slot_mapping_ptr,  # int64 [num_tokens]
    kv_scales_ptr,  # fp32 [2], or None
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cache_value_stride,  # from a key to its value
    block_stride,
    slot_stride,
    head_stride,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    heads = tl.arange(0, PADDED_KV_HEADS)[:, None]
    dims = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    is_element = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    key_places = token * key_token_stride + heads * key_head_stride + dims
    value_places = token * value_token_stride + heads * value_head_stride + dims
    key = tl.load(key_ptr + key_places, mask=is_element, other=0.0)
    value = tl.load(value_ptr + value_places, mask=is_element, other=0.0)
    if kv_scales_ptr is not None:
        key = encode_fp8(tl.div_rn(key.to(tl.float32), tl.load(kv_scales_ptr)))
        value = encode_fp8(tl.div_rn(value.to(tl.float32), tl.load(kv_scales_ptr + 1)))
    places = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + heads * head_stride + dims
    tl.store(kv_cache_ptr + places, key, mask=is_element)
    tl.store(kv_cache_ptr + cache_value_stride + places, value, mask=is_element)


@backend("triton", implements=write_kv)
def triton_write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    if kv_cache.dtype != (key.dtype if kv_scales is None else FP8_DTYPE):
        raise ValueError(f"kv_cache of {kv_cache.dtype}, key of {key.dtype}, kv_scales {kv_scales}: they do not fit")
    if key.stride(2) != 1 or value.stride(2) != 1 or kv_cache.stride(4) != 1:
        raise ValueError("key, value, kv_cache: the numbers of a vector must lie side by side")
    num_tokens, num_kv_heads, head_dim = key.shape
    if not num_tokens:
        return
    cache = kv_cache if kv_scales is None else kv_cache.view(torch.uint8)
    write_kv_kernel[(num_tokens,)](
        key,
        value,
        cache,
        slot_mapping,
        kv_scales,
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.stride()[:4],
        NUM_KV_HEADS=num_kv_heads,
        PADDED_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim,
        PADDED_HEAD_DIM=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=cache.shape[2],
        num_warps=2,
    )


@triton.jit
def copy_blocks_kernel(
    source_ptr,  # int32 [num_parts, blocks, block_words]
    destination_ptr,
    pairs_ptr,  # int64 [num_pairs, 2]: source block, destination block
    num_words,
    source_part_stride,
    source_block_stride,
    destination_part_stride,
    destination_block_stride,
    TILE: tl.constexpr,
):
    pair = tl.program_id(0)
    part = tl.program_id(1).to(tl.int64)
    source = tl.load(pairs_ptr + pair * 2)
    destination = tl.load(pairs_ptr + pair * 2 + 1)
    words = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_word = words < num_words
    source_places = part * source_part_stride + source * source_block_stride + words
    destination_places = part * destination_part_stride + destination * destination_block_stride + words
    tl.store(destination_ptr + destination_places, tl.load(source_ptr + source_places, mask=is_word), mask=is_word)


def order_copies(pairs: Pairs) -> tuple[list[list[tuple[int, int]]], list[tuple[int, int]]]:
    """Order copies within one cache so that each block is read before it is overwritten.

    Returns:
        Launches in order; and the copies, (source, destination), whose source must be put aside before the first of
        them, and written after the last: one of each ring of blocks that change places.
    """
    pending = {destination: source for source, destination in pairs if source != destination}
    num_readers: dict[int, int] = {}
    for source in pending.values():
        num_readers[source] = num_readers.get(source, 0) + 1
    launches: list[list[tuple[int, int]]] = []
    set_aside: list[tuple[int, int]] = []
    ready = [destination for destination in pending if destination not in num_readers]
    while pending:
        if ready:
            launch = [(pending.pop(destination), destination) for destination in ready]
            launches.append(launch)
        else:
            launch = [(source, destination) for destination, source in pending.items()][:1]
            del pending[launch[0][1]]
            set_aside += launch
        for source, _ in launch:
            num_readers[source] -= 1
        ready = [source for source in dict(launch) if not num_readers[source] and source in pending]
    return launches, set_aside


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    """Return int32 [num_layers · 2, num_blocks, words of a block], the same memory.

    Raises RuntimeError when a block is no whole number of words or its numbers do not lie side by side.
    """
    num_layers, _, num_blocks = cache.shape[:3]
    return cache.view(num_layers * 2, num_blocks, -1).view(torch.int32)


def _launch_copies(source: torch.Tensor, destination: torch.Tensor, pairs: Pairs) -> None:
    num_parts, _, num_words = source.shape
    device = destination.device if source.device.type == "cpu" else source.device
    tile = min(COPY_TILE, triton.next_power_of_2(num_words))
    copy_blocks_kernel[(len(pairs), num_parts, triton.cdiv(num_words, tile))](
        source,
        destination,
        torch.tensor(pairs, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True),
        num_words,
        *source.stride()[:2],
        *destination.stride()[:2],
        TILE=tile,
    )


@backend("triton", implements=copy_blocks)
def triton_copy_blocks(
    source_cache: torch.Tensor, destination_cache: torch.Tensor, block_pairs: Sequence[tuple[int, int]]
) -> None:
    if not block_pairs:
        return
    source, destination = _as_words(source_cache), _as_words(destination_cache)
    if source_cache.data_ptr() != destination_cache.data_ptr():
        _launch_copies(source, destination, block_pairs)
        return
    launches, set_aside = order_copies(block_pairs)
    aside = [source[:, block_id : block_id + 1].clone() for block_id, _ in set_aside]
    for pairs in launches:
        _launch_copies(source, destination, pairs)
    for block, (_, destination_id) in zip(aside, set_aside, strict=True):
        _launch_copies(block, destination, [(0, destination_id)])
