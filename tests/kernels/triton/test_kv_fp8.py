"""The numbers of an fp8 cache, all of them, against torch's e4m3."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from octavo.kernels.triton.kv_fp8 import decode_by_bits, decode_fp8, encode_fp8

TILE = 256


@triton.jit
def decode_kernel(codes_ptr, numbers_ptr, BY_BITS: tl.constexpr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    codes = tl.load(codes_ptr + index)
    numbers = decode_by_bits(codes) if BY_BITS else decode_fp8(codes)
    tl.store(numbers_ptr + index, numbers)


@triton.jit
def encode_kernel(numbers_ptr, codes_ptr, TILE: tl.constexpr):
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(codes_ptr + index, encode_fp8(tl.load(numbers_ptr + index)))


@pytest.mark.parametrize("by_bits", [True, False])
def test_every_code_is_read(by_bits: bool) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    numbers = torch.empty(256)
    decode_kernel[(1,)](codes, numbers, BY_BITS=by_bits, TILE=TILE)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(numbers.view(torch.int32)[~expected.isnan()], expected.view(torch.int32)[~expected.isnan()])
    assert torch.equal(numbers.isnan(), expected.isnan())


def interesting_numbers() -> torch.Tensor:
    """Every e4m3 number, what is half way between neighbours, next to both, and far outside."""
    finite = torch.arange(127, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    halves = (finite[1:] + finite[:-1]) / 2
    exact = np.concatenate((finite, halves, [447.9, 448.1, 463.9, 464.0, 480.0, 1e30, 3e-39])).astype(np.float32)
    near = np.concatenate((np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-1))))
    positive = np.concatenate((exact, near, [np.inf, np.nan])).astype(np.float32)
    numbers = torch.from_numpy(np.concatenate((positive, -positive)))
    return torch.cat((numbers, numbers.new_zeros(-len(numbers) % TILE)))


def test_numbers_are_rounded_to_the_nearest_and_cut_off() -> None:
    numbers = torch.cat((interesting_numbers(), torch.randn(4 * TILE) * 100))
    codes = torch.empty(len(numbers), dtype=torch.uint8)
    encode_kernel[(len(numbers) // TILE,)](numbers, codes, TILE=TILE)
    expected = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)
    wrong = (codes != expected.view(torch.uint8)) & ~numbers.isnan()
    assert not wrong.any(), numbers[wrong]
    assert codes.view(torch.float8_e4m3fn).float()[numbers.isnan()].isnan().all()
