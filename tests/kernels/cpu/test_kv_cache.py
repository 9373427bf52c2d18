"""Rotary embedding with the write of KV, and block copies, on the CPU.

What is in a cache is read back by attention over one token, whose result is that token's value, and whose key shows in
scores of two.
"""

from __future__ import annotations

import pytest
import torch
from cpu_kernels import assert_same_bits
from kernel_checks import DTYPES, random_tensor

from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.cpu.kv_cache import cpu_copy_blocks, cpu_rotary_and_write_kv, cpu_write_kv
from octavo.kernels.ops.attention import HeadShape, copy_blocks, write_kv
from octavo.kernels.ops.kv_formats import FP8_DTYPE, kv_vector_size
from octavo.kernels.ops.rotary_kv import rotary_and_write_kv
from octavo.kernels.registry import REFERENCE

reference_write_kv = write_kv.implementations[REFERENCE]
reference_rotary_and_write_kv = rotary_and_write_kv.implementations[REFERENCE]
reference_copy_blocks = copy_blocks.implementations[REFERENCE]

HEADS = HeadShape(6, 2, 32)
KINDS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, FP8_DTYPE),
    (torch.float32, FP8_DTYPE),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.int8),
]


def natural(cache: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The bytes of a cache of the kernels in the order of the reference's: uint8 [2, blocks, size, heads, bytes]."""
    num_blocks, block_size, num_heads, vector_size = cache.shape[1:]
    raw = cache.view(torch.uint8).view(2, num_blocks, -1)
    element = cache.element_size()
    if block_size % 16 or head_dim % 16:
        return raw.view(2, num_blocks, block_size, num_heads, vector_size * element)
    tiles = raw.view(2, num_blocks, num_heads, block_size // 16, -1)
    codes, rest = tiles.split((16 * head_dim * element, tiles.shape[-1] - 16 * head_dim * element), dim=-1)
    width = 1 if element == 4 else 2
    keys = (
        codes[0].reshape(num_blocks, num_heads, -1, head_dim // width, 16, width, element).permute(0, 2, 4, 1, 3, 5, 6)
    )
    values = codes[1].reshape(num_blocks, num_heads, -1, 16 // width, head_dim, width, element)
    values = values.permute(0, 2, 3, 5, 1, 4, 6)
    shape = (num_blocks, block_size, num_heads, head_dim * element)
    both = torch.stack((keys.reshape(shape), values.reshape(shape)))
    if not rest.shape[-1]:
        return both
    scales = rest.reshape(2, num_blocks, num_heads, block_size // 16, 16, 4).permute(0, 1, 3, 4, 2, 5)
    return torch.cat((both, scales.reshape(2, num_blocks, block_size, num_heads, 4)), dim=-1)


def empty_cache(dtype: torch.dtype, block_size: int, head_dim: int) -> torch.Tensor:
    shape = (2, 5, block_size, HEADS.num_kv_heads, kv_vector_size(dtype, head_dim))
    return torch.empty(shape, dtype=dtype).view(torch.uint8).fill_(0xFF).view(dtype)


def scales_of(dtype: torch.dtype) -> torch.Tensor | None:
    return torch.tensor([0.021, 0.013]) if dtype is FP8_DTYPE else None


@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=str)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 32), (32, 80), (4, 32), (16, 6), (1, 256)])
def test_write_kv_stores_the_bits_of_the_reference(
    each_isa, block_size: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    num_slots = 5 * block_size
    slots = torch.randperm(num_slots + 2, generator=torch.Generator().manual_seed(1))[: num_slots - 1]
    slots[slots >= num_slots] = -1
    key, value = (random_tensor(len(slots), 2, head_dim, dtype=dtype, seed=seed) for seed in (0, 1))
    key[0], value[-1, 0] = 0, 1e6  # a vector without a scale, and what saturates
    expected, got = empty_cache(kv_dtype, block_size, head_dim), empty_cache(kv_dtype, block_size, head_dim)

    cpu_write_kv(key, value, got, slots, scales_of(kv_dtype))

    reference_write_kv(key, value, expected, slots, scales_of(kv_dtype))
    assert_same_bits([natural(got, head_dim)], [expected.view(torch.uint8)])


@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=str)
@pytest.mark.parametrize("rotary_dim", [32, 20, 2])
def test_rotary_and_write_kv_equals_the_three_ops(
    executor, rotary_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    qkv, cos_sin = random_tensor(37, 10 * 32, dtype=dtype), random_tensor(50, rotary_dim, dtype=torch.float32)
    positions, slots = torch.arange(40, 3, -1), torch.arange(60, 23, -1)
    slots[5] = -1
    expected, got = empty_cache(kv_dtype, 16, 32), empty_cache(kv_dtype, 16, 32)
    scales = scales_of(kv_dtype)
    expected_query = reference_rotary_and_write_kv(qkv.clone(), positions, cos_sin, expected, slots, HEADS, scales)
    query = cpu_rotary_and_write_kv(qkv, positions, cos_sin, got, slots, HEADS, scales)
    assert_same_bits([query], [expected_query])
    assert query.data_ptr() == qkv.data_ptr()
    assert_same_bits([natural(got, 32)], [expected.view(torch.uint8)])


@pytest.mark.parametrize("slot", [80, 2**40, -2])
def test_slots_outside_the_cache_are_refused_and_nothing_is_written(executor, slot: int) -> None:
    key, cache = torch.zeros(1, 2, 32), empty_cache(torch.float32, 16, 32)
    with pytest.raises(IndexError):
        cpu_write_kv(key, key, cache, torch.tensor([slot]))
    assert_same_bits([cache], [empty_cache(torch.float32, 16, 32)])


@pytest.mark.parametrize("position", [50, -1])
def test_positions_outside_the_table_are_refused(position: int) -> None:
    EXECUTOR.start(1)
    qkv, cos_sin, cache = torch.zeros(1, 320), torch.zeros(50, 32), empty_cache(torch.float32, 16, 32)
    with pytest.raises(IndexError):
        cpu_rotary_and_write_kv(qkv, torch.tensor([position]), cos_sin, cache, torch.tensor([0]), HEADS)


@pytest.mark.parametrize("dtype", [*DTYPES, FP8_DTYPE, torch.int8], ids=str)
def test_copies_equal_the_reference(executor, dtype: torch.dtype) -> None:
    source = torch.randint(0, 256, (3, 2, 6, 16, 2, 36 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    for pairs in ([(5, 0), (2, 1)], [(3, 3)], [], [(0, 1), (1, 2), (2, 0)]):
        expected, got = source.clone(), source.clone()
        reference_copy_blocks(expected.view(torch.uint8), expected.view(torch.uint8), pairs)
        cpu_copy_blocks(got, got, pairs)
        assert_same_bits([got], [expected])
    host = torch.zeros(3, 2, 2, 16, 2, 36 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    cpu_copy_blocks(source, host, [(5, 0), (2, 1)])
    assert_same_bits([host], [source.view(torch.uint8)[:, :, [5, 2]].view(dtype)])
    with pytest.raises(IndexError):
        cpu_copy_blocks(source, host, [(5, 2)])
