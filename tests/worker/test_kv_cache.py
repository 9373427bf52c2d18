"""How many blocks fit, and the tensor that holds them."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.ops.kv_formats import FP8_DTYPE
from octavo.protocol.config import CacheConfig, KvCacheDtype
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.protocol.worker_messages import CopyKind
from octavo.worker import cpu_device
from octavo.worker.block_copies import BlockCopier
from octavo.worker.cpu_device import CPU_DEVICE
from octavo.worker.kv_cache import (
    KvShape,
    allocate_host_cache,
    allocate_kv_cache,
    block_num_bytes,
    describe_kv_cache,
    plan_num_blocks,
    plan_num_host_blocks,
    select_kv_dtype,
)

BLOCK_BYTES = 1000


SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=8)


def plan(cache=None, max_model_len=64, free_bytes=1_000_000, step_bytes=200_000):
    cache = cache or CacheConfig()
    return plan_num_blocks(cache, BLOCK_BYTES, max_model_len, CPU_DEVICE.kv_budget(cache, free_bytes, step_bytes))


def test_a_share_of_what_the_largest_step_leaves():
    assert plan(CacheConfig(memory_utilization=0.5)) == 400
    assert plan(CacheConfig(memory_utilization=1.0)) == 800
    assert plan(CacheConfig(memory_utilization=0.25), step_bytes=0) == 250


def test_a_given_size_is_taken():
    assert plan(CacheConfig(kv_cache_bytes=3_999)) == 3
    assert plan(CacheConfig(num_device_blocks=7)) == 7
    assert plan(CacheConfig(num_device_blocks=7, kv_cache_bytes=5_000)) == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step_bytes": 1_000_000}, "the largest step in 50% of what is left: 1.0 MiB needed"),
        ({"cache": CacheConfig(block_size=16), "max_model_len": 16 * 401}, "--max-model-len"),
        ({"cache": CacheConfig(kv_cache_bytes=999)}, "raise --kv-cache-memory"),
    ],
)
def test_too_little_memory_names_the_flag(arguments, words):
    with pytest.raises(StartupError) as caught:
        plan(**arguments)
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
    assert words in caught.value.message


def test_the_longest_request_that_just_fits_is_accepted():
    assert plan(CacheConfig(block_size=16), max_model_len=16 * 400) == 400


def test_the_tensor_has_the_size_that_was_planned():
    for dtype in (torch.float32, torch.bfloat16):
        cache = allocate_kv_cache(SHAPE, 5, 4, dtype, CPU_DEVICE)
        assert cache.shape == (3, 2, 5, 4, 2, 8)
        assert cache.nbytes == 5 * block_num_bytes(SHAPE, 4, dtype)


@pytest.mark.parametrize(("dtype", "vector_bytes"), [(FP8_DTYPE, 8), (torch.int8, 8 + 4)])
def test_8_bits_take_a_byte_each_and_int8_a_scale_for_each_vector(dtype, vector_bytes):
    cache = allocate_kv_cache(SHAPE, 5, 4, dtype, CPU_DEVICE)
    assert (cache.dtype, cache.shape) == (dtype, (3, 2, 5, 4, 2, vector_bytes))
    assert cache.nbytes == 5 * block_num_bytes(SHAPE, 4, dtype) == 3 * 2 * 5 * 4 * 2 * vector_bytes
    host_cache = allocate_host_cache(SHAPE, 7, cache, CPU_DEVICE)
    assert (host_cache.dtype, host_cache.shape) == (dtype, (3, 2, 7, 4, 2, vector_bytes))


@pytest.mark.parametrize(
    ("asked", "model_dtype", "dtype"),
    [
        (KvCacheDtype.AUTO, torch.float32, torch.float32),
        (KvCacheDtype.AUTO, torch.bfloat16, torch.bfloat16),
        (KvCacheDtype.BF16, torch.bfloat16, torch.bfloat16),
        (KvCacheDtype.FP8, torch.float32, FP8_DTYPE),
        (KvCacheDtype.INT8, torch.bfloat16, torch.int8),
    ],
)
def test_the_dtype_is_what_was_asked_for(asked, model_dtype, dtype):
    assert select_kv_dtype(asked, model_dtype, has_8_bit_kv=True) is dtype


@pytest.mark.parametrize(
    ("asked", "model_dtype", "has_8_bit_kv", "words"),
    [
        (KvCacheDtype.BF16, torch.float32, True, "--kv-cache-dtype bf16: the model computes in float32"),
        (KvCacheDtype.FP8, torch.bfloat16, False, "--kv-cache-dtype fp8: this device has no kernels for it"),
        (KvCacheDtype.INT8, torch.bfloat16, False, "--kv-cache-dtype int8: this device has no kernels for it"),
    ],
)
def test_a_dtype_that_attention_does_not_read_is_refused(asked, model_dtype, has_8_bit_kv, words):
    with pytest.raises(StartupError, match=words) as caught:
        select_kv_dtype(asked, model_dtype, has_8_bit_kv)
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize("dtype", [FP8_DTYPE, torch.int8])
def test_blocks_of_8_bits_are_swapped_and_checked(dtype):
    kv_cache = allocate_kv_cache(SHAPE, 4, 4, dtype, CPU_DEVICE)
    kv_cache.view(torch.uint8).random_(0, 127)
    copier = BlockCopier(kv_cache, allocate_host_cache(SHAPE, 4, kv_cache, CPU_DEVICE), check_swapped_blocks=True)
    before = kv_cache.view(torch.uint8).clone()
    copies = [(CopyKind.SWAP_OUT, 1, 3), (CopyKind.DEVICE, 0, 1), (CopyKind.SWAP_IN, 3, 2)]
    assert copier.apply(copies) == []
    assert torch.equal(kv_cache.view(torch.uint8)[:, :, [1, 2]], before[:, :, [0, 1]])


def test_more_than_the_machine_has_is_refused():
    with pytest.raises(StartupError) as caught:
        allocate_kv_cache(SHAPE, 2**40, 16, torch.float32, CPU_DEVICE)
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
    assert "--num-device-blocks" in caught.value.message


@pytest.mark.parametrize(
    ("cache", "num_blocks"),
    [
        (CacheConfig(), 0),
        (CacheConfig(swap_space_bytes=2_999), 2),
        (CacheConfig(swap_space_bytes=2_600, kv_offload_bytes=1_400), 4),
        (CacheConfig(swap_space_bytes=2_600, num_host_blocks=9), 9),
        (CacheConfig(swap_space_bytes=2_600, num_host_blocks=0), 0),
        (CacheConfig(num_host_blocks=800), 800),
    ],
)
def test_the_host_tier_is_what_was_asked_for(cache, num_blocks):
    assert plan_num_host_blocks(cache, BLOCK_BYTES, free_bytes=1_000_000, step_bytes=200_000) == num_blocks


def test_a_host_tier_that_does_not_fit_names_the_flags():
    with pytest.raises(StartupError) as caught:
        plan_num_host_blocks(CacheConfig(num_host_blocks=801), BLOCK_BYTES, free_bytes=1_000_000, step_bytes=200_000)
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
    for words in ("host tier", "1.0 MiB needed", "--swap-space-gib", "--kv-offload-gib", "--num-host-blocks"):
        assert words in caught.value.message


def test_a_start_without_a_host_tier_is_not_refused_for_it():
    assert plan_num_host_blocks(CacheConfig(), BLOCK_BYTES, free_bytes=100, step_bytes=200) == 0


def test_the_host_tier_looks_like_the_device_tier():
    kv_cache = allocate_kv_cache(SHAPE, 5, 4, torch.bfloat16, CPU_DEVICE)
    host_cache = allocate_host_cache(SHAPE, 7, kv_cache, CPU_DEVICE)
    assert host_cache.shape == (3, 2, 7, 4, 2, 8)
    assert (host_cache.dtype, host_cache.device) == (torch.bfloat16, torch.device("cpu"))
    assert "5 KV blocks of 4 tokens, 20 tokens" in describe_kv_cache(kv_cache, host_cache)
    assert "7 host blocks" in describe_kv_cache(kv_cache, host_cache)
    nothing = allocate_host_cache(SHAPE, 0, kv_cache, CPU_DEVICE)
    assert (nothing.nbytes, nothing.shape[2]) == (0, 0)
    assert "host" not in describe_kv_cache(kv_cache, nothing)


def test_both_tiers_together_must_fit(monkeypatch):
    kv_cache = allocate_kv_cache(SHAPE, 10, 4, torch.float32, CPU_DEVICE)
    block_bytes = kv_cache.nbytes // 10
    monkeypatch.setattr(cpu_device, "free_memory_bytes", lambda: 15 * block_bytes)
    assert allocate_host_cache(SHAPE, 5, kv_cache, CPU_DEVICE).shape[2] == 5
    with pytest.raises(StartupError, match="--num-host-blocks, or lower --kv-cache-memory"):
        allocate_host_cache(SHAPE, 6, kv_cache, CPU_DEVICE)
