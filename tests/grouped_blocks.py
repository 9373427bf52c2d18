"""Weights in blocks of GGUF files for tests, and a model in float64 of what the CPU computes with them."""

from __future__ import annotations

import torch

from octavo.kernels.cpu import packed_linear
from octavo.kernels.ops.packed_linear import (
    BLOCK_BYTES,
    WEIGHTS_PER_BLOCK,
    PackedWeight,
    WeightFormat,
    dequantize_rows,
)

BLOCK_FORMATS = tuple(BLOCK_BYTES)


def random_rows(weight_format: WeightFormat, num_outputs: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    """Return rows of blocks with scales of both signs, some of which are 0 or too small for a normal fp16 number."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = num_inputs // WEIGHTS_PER_BLOCK
    num_heads = 2 if weight_format is WeightFormat.Q4_1 else 1
    heads = torch.randn(num_outputs, num_blocks, num_heads, generator=generator) * 0.05
    heads[::7, ::3] *= 1e-4
    heads[1::9] = 0
    code_bytes = BLOCK_BYTES[weight_format] - 2 * num_heads
    codes = torch.randint(0, 256, (num_outputs, num_blocks, code_bytes), dtype=torch.uint8, generator=generator)
    return torch.cat((heads.half().view(torch.uint8), codes), dim=-1).view(num_outputs, -1)


def packed(rows: torch.Tensor, weight_format: WeightFormat, num_inputs: int, is_gated: bool = False) -> PackedWeight:
    num_outputs = len(rows)
    num_bytes = packed_linear.cpu_packed_num_bytes(weight_format, num_outputs, num_inputs, is_gated)
    weight = PackedWeight(torch.zeros(num_bytes, dtype=torch.uint8), weight_format, num_outputs, num_inputs, is_gated)
    packed_linear.cpu_pack_rows(weight, 0, rows)
    return weight


def random_weight(
    weight_format: WeightFormat, num_outputs: int, num_inputs: int, is_gated: bool = False
) -> tuple[PackedWeight, torch.Tensor]:
    """Return a packed weight, and the same in fp32 [num_outputs, num_inputs]."""
    rows = random_rows(weight_format, num_outputs, num_inputs)
    return packed(rows, weight_format, num_inputs, is_gated), dequantize_rows(rows, weight_format)


LARGEST_CODE = 127  # of an activation


def rounded_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x as the CPU rounds it, in float64, and the most that a number can have changed."""
    groups = x.float().view(len(x), -1, WEIGHTS_PER_BLOCK)
    most = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.full_like(most, LARGEST_CODE).div(most)
    codes = torch.where(most > 0, groups * inverse, torch.zeros_like(groups)).round()
    scales = (most / LARGEST_CODE).double()
    largest_change = (0.5001 * scales).expand_as(groups)
    return (codes.double() * scales).view(x.shape), largest_change.reshape(x.shape)


def assert_product(y: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
    """Check fp32 y against both models: with rounded activations tightly, with those given within their rounding."""
    rounded, largest_change = rounded_activations(x)
    magnitudes = weights.double().abs()
    # Minimums and codes are added apart, and both can be much larger than the weight; codes are at most 255 scales.
    terms = rounded.abs() @ (magnitudes + magnitudes.amax(dim=1, keepdim=True)).t()
    num_roundings = 2 + x.shape[1] // WEIGHTS_PER_BLOCK / 8  # most of which cancel out
    assert ((y.double() - rounded @ weights.double().t()).abs() <= terms * num_roundings * 2**-24).all()
    changed = largest_change @ magnitudes.t()
    assert ((y.double() - x.double() @ weights.double().t()).abs() <= changed + terms * num_roundings * 2**-24).all()
