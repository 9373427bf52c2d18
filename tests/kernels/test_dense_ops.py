"""Linear, norm, rotary, activation: against float64, and rows that do not depend on other rows."""

import math

import pytest
import torch
from kernel_checks import DTYPES, assert_close, needs_steady_products, random_tensor

from octavo.kernels.ops.activation import gelu_mul, silu_mul
from octavo.kernels.ops.linear import head_logits, linear
from octavo.kernels.ops.norm import rms_norm
from octavo.kernels.ops.rotary import rotary

ROW_COUNTS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 200, 256, 257, 384)
SMOLLM2_SHAPES = {"qkv": (576, 960), "out": (576, 576), "gate_up": (576, 3072), "down": (1536, 576)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "num_inputs"), [(0, 8), (1, 8), (5, 576), (129, 64), (2, 5000), (1030, 16)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(num_tokens: int, num_inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    x = random_tensor(num_tokens, num_inputs, dtype=dtype)
    weight = random_tensor(24, num_inputs, dtype=dtype, seed=1) / math.sqrt(num_inputs)
    bias = random_tensor(24, dtype=dtype, seed=2) if has_bias else None

    result = linear(x, weight, bias)

    expected = torch.einsum("ti,oi->to", x.double(), weight.double())
    assert_close(result, expected if bias is None else expected + bias.double())
    assert result.is_contiguous()


@needs_steady_products
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SMOLLM2_SHAPES.values(), ids=SMOLLM2_SHAPES.keys())
def test_a_row_of_linear_has_the_same_bits_in_any_company(shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_inputs, num_outputs = shape
    x = random_tensor(400, num_inputs, dtype=dtype)
    weight = random_tensor(num_outputs, num_inputs, dtype=dtype, seed=1) / math.sqrt(num_inputs)
    alone = torch.cat([linear(row, weight) for row in x.split(1)])
    for num_rows in ROW_COUNTS:
        for first in (0, 400 - num_rows):
            rows = slice(first, first + num_rows)
            assert torch.equal(linear(x[rows], weight), alone[rows]), f"{num_rows} rows from {first}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 50), (1, 50), (3, 32), (5, 131)])
def test_head_logits_are_fp32_whatever_the_tile(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    hidden = random_tensor(num_rows, 48, dtype=dtype)
    weight = random_tensor(vocab_size, 48, dtype=dtype, seed=1) / 7
    tiles = [torch.full((num_tile_rows, 48), torch.nan) for num_tile_rows in (32, 200)]

    in_parts, in_one = (head_logits(hidden, weight, tile) for tile in tiles)

    assert in_parts.dtype == torch.float32
    for logits in (in_parts, in_one):
        assert_close(logits, hidden.double() @ weight.double().t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_rms_norm(num_tokens: int, dtype: torch.dtype) -> None:
    x = random_tensor(num_tokens, 96, dtype=dtype)
    weight = random_tensor(96, dtype=dtype, seed=1)

    mean_squares = torch.stack([row.double().square().sum() / 96 for row in x]) if num_tokens else torch.zeros(0)
    expected = x.double() / torch.sqrt(mean_squares.double() + 1e-5)[:, None] * weight.double()
    assert_close(rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_adds_the_residual_first(dtype: torch.dtype) -> None:
    x, residual = random_tensor(5, 64, dtype=dtype), random_tensor(5, 64, dtype=dtype, seed=1)
    weight = random_tensor(64, dtype=dtype, seed=2)

    normed, total = rms_norm(x, weight, 1e-6, residual)

    assert_close(total, x.double() + residual.double())
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))


def test_rms_norm_of_large_activations_does_not_overflow() -> None:
    x = torch.full((1, 64), 3e4, dtype=torch.bfloat16)
    assert_close(rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-6), torch.ones(1, 64, dtype=torch.float64))


def naive_rotary(heads: torch.Tensor, positions: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    result = heads.double().clone()
    half = angles.shape[1]
    for token, position in enumerate(positions.tolist()):
        for pair in range(half):
            cos, sin = math.cos(angles[position, pair]), math.sin(angles[position, pair])
            first, second = heads[token, :, pair].double(), heads[token, :, pair + half].double()
            result[token, :, pair] = first * cos - second * sin
            result[token, :, pair + half] = first * sin + second * cos
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_rotary(rotary_dim: int, dtype: torch.dtype) -> None:
    """Also with heads of which only the first half turns."""
    query, key = random_tensor(6, 4, 16, dtype=dtype), random_tensor(6, 2, 16, dtype=dtype, seed=1)
    positions = torch.tensor([0, 1, 30, 2, 2, 17])
    frequencies = 10.0 ** -torch.arange(rotary_dim // 2).double()
    angles = torch.arange(31).double()[:, None] * frequencies
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).float()

    turned_query, turned_key = rotary(query, key, positions, cos_sin)

    assert_close(turned_query, naive_rotary(query, positions, angles))
    assert_close(turned_key, naive_rotary(key, positions, angles))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = random_tensor(3, 5, 40, dtype=dtype) * 4
    gate, up = gate_up[..., :20].double(), gate_up[..., 20:].double()
    assert_close(silu_mul(gate_up), gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_mul(dtype: torch.dtype) -> None:
    gate_up = random_tensor(3, 5, 40, dtype=dtype) * 4
    gate, up = gate_up[..., :20].double(), gate_up[..., 20:].double()
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    assert_close(gelu_mul(gate_up), gate / 2 * (1 + torch.tanh(inner)) * up)


def test_rows_of_small_ops_have_the_same_bits_in_any_company() -> None:
    x, weight = random_tensor(65, 1542, dtype=torch.float32), random_tensor(1542, dtype=torch.float32, seed=1)
    together_norm, together_silu = rms_norm(x, weight, 1e-6), silu_mul(x)
    for row in range(65):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], together_norm[row])
        assert torch.equal(silu_mul(x[row : row + 1])[0], together_silu[row])
