"""Writes into the KV cache and copies of blocks on a GPU, against the reference ops, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.ops.attention import copy_blocks, write_kv
from octavo.kernels.ops.kv_formats import FP8_DTYPE
from octavo.kernels.registry import REFERENCE
from octavo.kernels.triton import kv_cache as kernels
from octavo.kernels.triton.kv_cache import order_copies, triton_copy_blocks, triton_write_kv

reference_write_kv = write_kv.implementations[REFERENCE]
reference_copy_blocks = copy_blocks.implementations[REFERENCE]


def random_tensor(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"), [(1, 64, 16), (3, 80, 32), (8, 128, 64), (2, 256, 16)]
)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_tokens_go_to_their_slots(
    num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, is_fp8: bool
) -> None:
    """Keys and values are views into a fused projection whose other numbers are NaN; two slots are padding."""
    fused = torch.full((7, 3 * num_kv_heads + 1, head_dim), torch.nan, dtype=dtype)
    fused[:, :num_kv_heads] = random_tensor(7, num_kv_heads, head_dim, dtype=dtype)
    fused[:, -num_kv_heads:] = random_tensor(7, num_kv_heads, head_dim, dtype=dtype, seed=1)
    key, value = fused[:, :num_kv_heads], fused[:, -num_kv_heads:]
    slots = torch.tensor([block_size, -1, 0, 4 * block_size - 1, 2 * block_size + 5, block_size - 1, -1])
    layers = torch.full((3, 2, 4, block_size, num_kv_heads, head_dim), torch.nan).to(FP8_DTYPE if is_fp8 else dtype)
    expected = layers.clone()
    scales = torch.tensor([0.003, 0.02]) if is_fp8 else None  # some keys are cut off

    triton_write_kv(key, value, layers[1], slots, scales)

    reference_write_kv(key, value, expected[1], slots, scales)
    assert same_bits(layers, expected)


def test_no_tokens_are_written() -> None:
    cache = torch.zeros(2, 1, 16, 1, 64)
    triton_write_kv(torch.zeros(0, 1, 64), torch.zeros(0, 1, 64), cache, torch.zeros(0, dtype=torch.int64))
    assert not cache.any()


def test_what_does_not_fit_is_refused() -> None:
    key, cache, slots = torch.zeros(1, 1, 64), torch.zeros(2, 1, 16, 1, 64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="kv_cache of"):
        triton_write_kv(key.half(), key.half(), cache, slots)
    with pytest.raises(ValueError, match="kv_cache of"):
        triton_write_kv(key, key, cache, slots, torch.ones(2))
    wide = torch.zeros(1, 1, 128)[..., ::2]
    with pytest.raises(ValueError, match="side by side"):
        triton_write_kv(key, wide, cache, slots)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, FP8_DTYPE], ids=str)
def test_copies_between_tiers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of several tiles of which the last is not full."""
    monkeypatch.setattr(kernels, "COPY_TILE", 128)
    device, host = (random_tensor(3, 2, num_blocks, 4, 1, 72, dtype=dtype) for num_blocks in (5, 3))
    expected = host.clone()
    pairs = [(4, 0), (1, 2), (0, 1)]
    triton_copy_blocks(device, host, pairs)
    reference_copy_blocks(device.view(torch.uint8), expected.view(torch.uint8), pairs)
    assert same_bits(host, expected)
    triton_copy_blocks(device, host, [])
    assert same_bits(host, expected)


distinct_destinations = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), unique_by=lambda pair: pair[1])


@settings(max_examples=40, deadline=None)
@given(pairs=distinct_destinations)
def test_copies_within_one_cache_read_every_source_first(pairs: list[tuple[int, int]]) -> None:
    cache = random_tensor(2, 2, 8, 2, 1, 8, dtype=torch.float32)
    expected = cache.clone()
    triton_copy_blocks(cache, cache[:], pairs)  # another view of the same memory
    reference_copy_blocks(expected, expected, pairs)
    assert torch.equal(cache, expected)


@settings(max_examples=300, deadline=None)
@given(pairs=distinct_destinations)
def test_ordered_copies(pairs: list[tuple[int, int]]) -> None:
    launches, set_aside = order_copies(pairs)
    done = [pair for launch in launches for pair in launch] + set_aside
    assert sorted(done) == sorted(pair for pair in pairs if pair[0] != pair[1])
    written: set[int] = set()
    for launch in launches:
        destinations = {destination for _, destination in launch}
        assert not {source for source, _ in launch} & (written | destinations)
        written |= destinations


def test_independent_copies_are_one_launch_and_rings_put_one_block_aside() -> None:
    assert order_copies([(0, 1), (0, 2), (3, 4)]) == ([[(0, 1), (0, 2), (3, 4)]], [])
    assert order_copies([(0, 1), (1, 2)]) == ([[(1, 2)], [(0, 1)]], [])
    launches, set_aside = order_copies([(0, 1), (1, 2), (2, 0)])
    assert len(set_aside) == 1
    assert [len(launch) for launch in launches] == [1, 1]
