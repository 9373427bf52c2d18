"""The KV cache: how many blocks fit in each memory tier, and the tensors that hold them.

A tier is one tensor that is allocated once and never grows, so that serving cannot run out of memory later. On a CPU
its pages cost nothing until a block is first written. The number of device blocks is what the device's budget holds
when the weights are in, the largest step has been seen, and on a CPU the host tier is taken off; a size given in bytes
or blocks is taken as it is, and the host tier always is such a size. Beside a GPU it is pinned.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from octavo.kernels.ops.kv_formats import FP8_DTYPE, kv_vector_size
from octavo.protocol.config import CacheConfig, KvCacheDtype
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.device import MIB, Device, MemoryBudget, check_fits, explain_out_of_memory, out_of_memory
from octavo.worker.host import free_memory_bytes, use_huge_pages

KV_CACHE = "the KV cache"
HOST_TIER = "the host tier of the KV cache"
LOWER_HOST_SIZE = "lower --swap-space-gib, --kv-offload-gib or --num-host-blocks"
LOWER_KV_SIZE = "lower --kv-cache-memory or --num-device-blocks"
LOWER_STEP_SIZE = "lower --max-model-len, --max-num-batched-tokens or --max-num-seqs"

KV_DTYPES = {
    KvCacheDtype.BF16: torch.bfloat16,
    KvCacheDtype.FP8: FP8_DTYPE,
    KvCacheDtype.INT8: torch.int8,
}


class KvShape(NamedTuple):
    """What a token's keys and values are on this rank: of each layer, `num_kv_heads` vectors of `head_dim` each."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def block_num_bytes(shape: KvShape, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers, keys and values together."""
    return math.prod(kv_cache_shape(shape, 1, block_size, dtype)) * dtype.itemsize


def kv_cache_shape(shape: KvShape, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the dimensions of a tier whose keys and values are held in `dtype`."""
    vector_size = kv_vector_size(dtype, shape.head_dim)
    return (shape.num_layers, 2, num_blocks, block_size, shape.num_kv_heads, vector_size)


def select_kv_dtype(asked: KvCacheDtype, model_dtype: torch.dtype, has_8_bit_kv: bool) -> torch.dtype:
    """Return the dtype of the KV cache beside a model that computes in `model_dtype`.

    Raises StartupError(USAGE) for one that the device's attention does not read.
    """
    if asked is KvCacheDtype.AUTO:
        return model_dtype
    if asked is KvCacheDtype.BF16 and model_dtype is not torch.bfloat16:
        name = str(model_dtype).removeprefix("torch.")
        raise StartupError(
            ExitCode.USAGE, f"--kv-cache-dtype bf16: the model computes in {name}; add --dtype bfloat16, or use int8"
        )
    if asked is not KvCacheDtype.BF16 and not has_8_bit_kv:
        raise StartupError(ExitCode.USAGE, f"--kv-cache-dtype {asked}: this device has no kernels for it; use auto")
    return KV_DTYPES[asked]


def plan_num_blocks(cache: CacheConfig, block_bytes: int, max_model_len: int, budget: MemoryBudget) -> int:
    """Return how many device blocks of `block_bytes` to allocate.

    Raises StartupError(OUT_OF_MEMORY) when the budget does not hold one request of `max_model_len` tokens. A size that
    the user gave is not second-guessed: the engine core refuses a request that can never fit.
    """
    if cache.num_device_blocks is not None:
        return cache.num_device_blocks
    if cache.kv_cache_bytes is not None:
        num_blocks = cache.kv_cache_bytes // block_bytes
        if num_blocks == 0:
            raise out_of_memory("one KV block", block_bytes, "raise --kv-cache-memory", budget.free_bytes)
        return num_blocks
    if budget.num_bytes <= 0:
        purpose = f"the largest step in {budget.share}"
        raise out_of_memory(purpose, budget.reserved_bytes, f"{LOWER_STEP_SIZE}; {budget.advice}", budget.free_bytes)
    num_blocks = budget.num_bytes // block_bytes
    num_needed = math.ceil(max_model_len / cache.block_size)
    if num_blocks < num_needed:
        purpose = f"one request of {max_model_len} tokens in {budget.share}"
        raise out_of_memory(purpose, num_needed * block_bytes, budget.advice, budget.free_bytes)
    return num_blocks


def plan_num_host_blocks(cache: CacheConfig, block_bytes: int, free_bytes: int, step_bytes: int) -> int:
    """Return how many host blocks of `block_bytes` to allocate.

    Args:
        free_bytes: of the host's memory.
        step_bytes: what the largest step takes of it.

    Raises StartupError(OUT_OF_MEMORY) when they do not fit beside the largest step.
    """
    num_blocks = cache.num_host_blocks
    if num_blocks is None:
        num_blocks = (cache.swap_space_bytes + cache.kv_offload_bytes) // block_bytes
    needed_bytes = num_blocks * block_bytes + step_bytes
    if num_blocks and needed_bytes > free_bytes:
        raise out_of_memory(f"{HOST_TIER} and the largest step", needed_bytes, LOWER_HOST_SIZE)
    return num_blocks


def allocate_kv_cache(
    shape: KvShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: Device
) -> torch.Tensor:
    """Return [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], uninitialised; see `kv_cache_shape`.

    Raises StartupError(OUT_OF_MEMORY) when it is larger than what is free.
    """
    num_bytes, free_bytes = num_blocks * block_num_bytes(shape, block_size, dtype), device.free_bytes()
    check_fits(KV_CACHE, num_bytes, LOWER_KV_SIZE, free_bytes)
    with explain_out_of_memory(KV_CACHE, num_bytes, LOWER_KV_SIZE, free_bytes):
        sizes = kv_cache_shape(shape, num_blocks, block_size, dtype)
        kv_cache = torch.empty(sizes, dtype=dtype, device=device.torch_device)
    if device.uses_host_memory:
        # Blocks of a request lie anywhere: with small pages nearly every one costs a walk through the page table.
        use_huge_pages(kv_cache.data_ptr(), kv_cache.nbytes)
    return kv_cache


def allocate_host_cache(shape: KvShape, num_blocks: int, kv_cache: torch.Tensor, device: Device) -> torch.Tensor:
    """Return a tensor like `kv_cache` with `num_blocks`, 0 or more, in host memory that the device can reach.

    Raises StartupError(OUT_OF_MEMORY) when it does not fit; beside `kv_cache` when the host's memory is the device's,
    because that one's pages are still to be taken.
    """
    block_size, dtype = kv_cache.shape[3], kv_cache.dtype
    num_bytes = num_blocks * block_num_bytes(shape, block_size, dtype)
    purpose, needed_bytes, free_bytes = HOST_TIER, num_bytes, free_memory_bytes()
    if device.uses_host_memory:
        purpose, needed_bytes = f"{KV_CACHE} and its host tier", num_bytes + kv_cache.nbytes
        free_bytes = device.free_bytes()
    advice = f"{LOWER_HOST_SIZE}, or {LOWER_KV_SIZE}"
    check_fits(purpose, needed_bytes, advice, free_bytes)
    sizes = kv_cache_shape(shape, num_blocks, block_size, dtype)
    with explain_out_of_memory(purpose, needed_bytes, advice, free_bytes):
        return device.empty_host(sizes, dtype) if num_blocks else torch.empty(sizes, dtype=dtype)


def describe_kv_cache(kv_cache: torch.Tensor, host_cache: torch.Tensor) -> str:
    """Say in words how large both tiers are."""
    num_blocks, block_size = kv_cache.shape[2:4]
    num_tokens, size = num_blocks * block_size, f"{kv_cache.nbytes / MIB:.0f} MiB"
    text = f"{num_blocks} KV blocks of {block_size} tokens, {num_tokens} tokens, {size}"
    if num_host_blocks := host_cache.shape[2]:
        text += f", {num_host_blocks} host blocks, {host_cache.nbytes / MIB:.0f} MiB"
    return text
