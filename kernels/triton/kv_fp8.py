"""The e4m3 numbers of an fp8 KV cache (OCP 8-bit floating point specification, 2023), as their bytes.

Caches reach kernels as uint8, so that one source compiles for GPUs with and without instructions for e4m3. Where
NVIDIA has such instructions they read; elsewhere (AMD's CDNA 3 has those of another e4m3), and for all writes, of which
there are few, integer arithmetic does what they would do: round to nearest even, exact below the smallest normal
number, NaN stays NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

FP8_MAX = tl.constexpr(448.0)
HALF_NAN = tl.constexpr(0x7E00)


@triton.jit
def decode_by_bits(codes):
    """Return uint8 codes as the fp32 numbers that they stand for: shifted into fp16, whose exponent has 8 more bias."""
    wide = codes.to(tl.uint16)
    magnitude = wide & 0x7F
    half = tl.where(magnitude == 0x7F, HALF_NAN, (wide & 0x80) << 8 | magnitude << 7).to(tl.uint16)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def decode_fp8(codes):
    """Return uint8 codes as fp32 numbers, by the instruction where the target has one."""
    if cuda_capability_geq(8, 9):
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        numbers = decode_by_bits(codes)
    return numbers


@triton.jit
def encode_fp8(numbers):
    """Return the uint8 codes of the e4m3 numbers nearest to fp32 `numbers`, which are cut off at ±448."""
    bits = numbers.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(numbers), FP8_MAX)
    size_bits = size.to(tl.uint32, bitcast=True)
    # Exponent bias 127 becomes 7, and 20 of the 23 mantissa bits go; a carry out of the mantissa raises the exponent.
    normal = (size_bits + 0x7FFFF + ((size_bits >> 20) & 1) - (120 << 23)) >> 20
    # Below 2^-6 codes count steps of 2^-9, which is what the last bit of a number near 2^14 is worth.
    subnormal = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(size < 0.015625, subnormal, normal)
    code = tl.where(numbers != numbers, 0x7F, code)
    return (sign | code).to(tl.uint8)
