"""Products of bfloat16 activations with blocks that are widened for the tile unit: AMX only."""

from __future__ import annotations

import cpu_kernels
import pytest
import torch
from grouped_blocks import BLOCK_FORMATS, packed, random_rows

from octavo.kernels.cpu import packed_linear
from octavo.kernels.cpu.execution import Executor
from octavo.kernels.ops.packed_linear import (
    BLOCK_BYTES,
    WEIGHTS_PER_BLOCK,
    Activation,
    PackedWeight,
    WeightFormat,
    dequantize_rows,
)

all_formats = pytest.mark.parametrize("weight_format", BLOCK_FORMATS)


@pytest.fixture
def amx(executor: Executor) -> Executor:
    if "amx" not in cpu_kernels.supported_instruction_sets():
        pytest.skip("this CPU has no AMX")
    executor.start(1, "amx")
    return executor


def as_dense(weights: torch.Tensor, is_gated: bool = False) -> PackedWeight:
    """Return bfloat16 weights, [num_outputs, num_inputs], packed as what they are."""
    num_outputs, num_inputs = weights.shape
    num_bytes = packed_linear.cpu_packed_num_bytes(WeightFormat.BFLOAT16, num_outputs, num_inputs, is_gated)
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    weight = PackedWeight(data, WeightFormat.BFLOAT16, num_outputs, num_inputs, is_gated)
    packed_linear.cpu_pack_rows(weight, 0, weights)
    return weight


def seen_by_the_kernel(weight: PackedWeight) -> torch.Tensor:
    """Return the weights as products with unit vectors show them."""
    return packed_linear.cpu_packed_logits(torch.eye(weight.num_inputs).bfloat16(), weight).t()


@all_formats
def test_weights_are_the_neighbours_of_what_blocks_mean(amx: Executor, weight_format: WeightFormat) -> None:
    torch.manual_seed(0)
    rows = random_rows(weight_format, 77, 320)
    seen, exact = seen_by_the_kernel(packed(rows, weight_format, 320)), dequantize_rows(rows, weight_format)
    assert torch.equal(seen, seen.bfloat16().float())
    # Before a number is cut to bfloat16, the place of its code in the mantissa costs up to 2^-12 of a step of codes.
    steps = rows.view(77, 10, BLOCK_BYTES[weight_format])[:, :, :2].contiguous().view(torch.float16).float().abs()
    slack = steps.expand(77, 10, WEIGHTS_PER_BLOCK).reshape(77, 320) * 2**-12
    spacing = 2.0 ** (torch.frexp(exact).exponent - 8)
    assert ((seen - exact).abs() <= spacing + slack).all()
    is_large = exact.abs() > 64 * slack
    growth = ((seen - exact) * exact.sign() / spacing)[is_large]
    assert growth.abs().mean() < 0.3
    assert growth.mean().abs() < 0.06
    if weight_format is not WeightFormat.Q4_1:
        assert torch.equal(seen == 0, exact == 0)


@pytest.mark.parametrize("weight_format", [WeightFormat.Q8_0, WeightFormat.Q4_0])
def test_what_is_a_bfloat16_stays_itself(amx: Executor, weight_format: WeightFormat) -> None:
    rows = random_rows(weight_format, 64, 96)
    blocks = rows.view(64, 3, BLOCK_BYTES[weight_format])
    blocks[:, :, :2] = torch.tensor([0.0625]).half().view(torch.uint8)
    exact = dequantize_rows(rows, weight_format)
    assert (exact == 0).any()
    assert torch.equal(seen_by_the_kernel(packed(rows, weight_format, 96)), exact)


@all_formats
@pytest.mark.parametrize("num_inputs", [32, 224, 1696])
def test_product_has_the_bits_of_the_same_weights_held_as_bfloat16(
    amx: Executor, weight_format: WeightFormat, num_inputs: int
) -> None:
    torch.manual_seed(0)
    rows = random_rows(weight_format, 90, num_inputs)
    for is_gated in (False, True):
        blocks = packed(rows, weight_format, num_inputs, is_gated)
        plain = packed(rows, weight_format, num_inputs)
        dense = as_dense(seen_by_the_kernel(plain).bfloat16(), is_gated)
        for num_tokens in (1, 3, 16, 17, 33, 100):
            x = torch.randn(num_tokens, num_inputs).bfloat16()
            if is_gated:
                got = packed_linear.cpu_packed_gated_linear(x, blocks, Activation.SILU)
                expected = packed_linear.cpu_packed_gated_linear(x, dense, Activation.SILU)
            else:
                got, expected = (packed_linear.cpu_packed_logits(x, weight) for weight in (blocks, dense))
            cpu_kernels.assert_same_bits([got], [expected])
