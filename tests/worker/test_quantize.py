"""Numbers rounded to blocks: the errors that the formats allow, and no more."""

from __future__ import annotations

import gguf
import pytest
import torch

from octavo.kernels.ops.packed_linear import BLOCK_BYTES, WeightFormat, dequantize_rows
from octavo.worker.quantize import quantize_rows

FORMATS = (WeightFormat.Q8_0, WeightFormat.Q4_1)


def weights(num_rows: int = 48, num_inputs: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, num_inputs, generator=generator) * 0.05


def errors(rows: torch.Tensor, blocks: WeightFormat) -> torch.Tensor:
    stored = quantize_rows(rows, blocks)
    assert stored.dtype is torch.uint8
    assert stored.shape == (len(rows), rows.shape[1] // 32 * BLOCK_BYTES[blocks])
    return (dequantize_rows(stored, blocks) - rows.float()).view(-1, 32)


def test_8_bits_err_by_half_a_step():
    rows = weights()
    largest = rows.view(-1, 32).abs().amax(1)
    assert (errors(rows, WeightFormat.Q8_0).abs().amax(1) <= largest / 254 * 1.01).all()


def test_4_bits_err_less_than_the_plain_rounding_of_the_library():
    rows = weights()
    plain = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType.Q4_1)
    plain_error = torch.from_numpy(gguf.quants.dequantize(plain, gguf.GGMLQuantizationType.Q4_1)) - rows
    ours = errors(rows, WeightFormat.Q4_1)
    assert (ours.square().sum(1) <= plain_error.view(-1, 32).square().sum(1) * 1.001).all()
    assert ours.square().mean() < 0.9 * plain_error.square().mean()


@pytest.mark.parametrize("blocks", FORMATS)
def test_what_blocks_hold_is_found_again(blocks):
    held = dequantize_rows(quantize_rows(weights(), blocks), blocks)
    again = dequantize_rows(quantize_rows(held, blocks), blocks)
    torch.testing.assert_close(again, held, rtol=0, atol=1e-4)


@pytest.mark.parametrize("blocks", FORMATS)
@pytest.mark.parametrize("value", [0.0, 1.5, -0.25])
def test_equal_weights_stay(blocks, value):
    rows = torch.full((3, 64), value)
    assert errors(rows, blocks).abs().max() <= abs(value) / 1000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_is_rounded(dtype):
    rows = weights().to(dtype)
    assert torch.equal(quantize_rows(rows, WeightFormat.Q8_0), quantize_rows(rows.float(), WeightFormat.Q8_0))


def test_a_format_without_rounding_is_refused():
    with pytest.raises(ValueError, match="Q4_0"):
        quantize_rows(weights(), WeightFormat.Q4_0)
