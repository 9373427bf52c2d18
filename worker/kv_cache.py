"""The KV cache: how many blocks fit, the one tensor that holds them, and block copies.

The tensor is allocated once and never grows, so that serving cannot run out of memory later. On a CPU its pages cost
nothing until a block is first written. The number of blocks is a share of what is free when the weights are in and the
largest step has been seen; a size given in bytes or blocks is taken as it is.
"""

from __future__ import annotations

import math

import torch

from octavo.protocol.config import CacheConfig
from octavo.worker.device import MIB, check_fits, explain_out_of_memory, out_of_memory
from octavo.worker.models.config import LlamaConfig

KV_CACHE = "the KV cache"
LOWER_KV_SIZE = "lower --kv-cache-memory or --num-device-blocks"
LOWER_STEP_SIZE = "lower --max-model-len, --max-num-batched-tokens or --max-num-seqs"
LOWER_MODEL_LEN = "lower --max-model-len or raise --memory-utilization"


def block_num_bytes(config: LlamaConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers, keys and values together."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


def plan_num_blocks(cache: CacheConfig, block_bytes: int, max_model_len: int, free_bytes: int, step_bytes: int) -> int:
    """Return how many device blocks to allocate.

    Args:
        block_bytes: of one block, see `block_num_bytes`.
        free_bytes: memory that is free now.
        step_bytes: what the largest step takes of it while it runs.

    Raises StartupError(OUT_OF_MEMORY) when the share of the memory that is left does not hold one request of
    `max_model_len` tokens. A size that the user gave is not second-guessed: the engine core refuses a request that
    can never fit.
    """
    if cache.num_device_blocks is not None:
        return cache.num_device_blocks
    if cache.kv_cache_bytes is not None:
        num_blocks = cache.kv_cache_bytes // block_bytes
        if num_blocks == 0:
            raise out_of_memory("one KV block", block_bytes, "raise --kv-cache-memory")
        return num_blocks
    if step_bytes >= free_bytes:
        raise out_of_memory("the largest step", step_bytes, LOWER_STEP_SIZE)
    num_blocks = int((free_bytes - step_bytes) * cache.memory_utilization) // block_bytes
    num_needed = math.ceil(max_model_len / cache.block_size)
    if num_blocks < num_needed:
        share = f"{cache.memory_utilization:.0%} of what is left"
        needed_bytes = num_needed * block_bytes
        raise out_of_memory(f"one request of {max_model_len} tokens in {share}", needed_bytes, LOWER_MODEL_LEN)
    return num_blocks


def allocate_kv_cache(
    config: LlamaConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], uninitialised.

    Raises StartupError(OUT_OF_MEMORY) when it is larger than what is free.
    """
    num_bytes = num_blocks * block_num_bytes(config, block_size, dtype)
    check_fits(KV_CACHE, num_bytes, LOWER_KV_SIZE)
    shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
    with explain_out_of_memory(KV_CACHE, num_bytes, LOWER_KV_SIZE):
        return torch.empty(shape, dtype=dtype, device=device)


def describe_kv_cache(num_blocks: int, block_size: int, num_bytes: int) -> str:
    return f"{num_blocks} KV blocks of {block_size} tokens, {num_blocks * block_size} tokens, {num_bytes / MIB:.0f} MiB"
