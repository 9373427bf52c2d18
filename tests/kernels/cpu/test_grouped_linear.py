"""Products with weights in GGUF blocks: against a float64 model, between instruction sets, with unpleasant numbers.

Activations are rounded to whole numbers, but not bfloat16 ones with AMX, for which see `test_widened_linear`.
"""

from __future__ import annotations

import cpu_kernels
import pytest
import torch
from grouped_blocks import BLOCK_FORMATS, LARGEST_CODE, assert_product, packed, random_rows, random_weight

from octavo.kernels.cpu import packed_linear
from octavo.kernels.cpu.execution import EXECUTOR, Executor
from octavo.kernels.ops.activation import gelu_mul, silu_mul
from octavo.kernels.ops.packed_linear import Activation, PackedWeight, WeightFormat, dequantize_rows, row_num_bytes


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


all_formats = pytest.mark.parametrize("weight_format", BLOCK_FORMATS)


@all_formats
@pytest.mark.parametrize("num_outputs", [1, 31, 32, 77, 160])
@pytest.mark.parametrize("num_inputs", [32, 160, 1696])
def test_product_is_that_of_the_rounded_activations(
    each_isa: Executor, weight_format: WeightFormat, num_outputs: int, num_inputs: int
) -> None:
    weight, weights = random_weight(weight_format, num_outputs, num_inputs)
    for num_tokens in (1, 2, 5, 8, 21, 40):
        x = torch.randn(num_tokens, num_inputs)
        assert_product(packed_linear.cpu_packed_linear(x, weight, None), x, weights)


@all_formats
def test_weight_has_the_size_of_its_blocks(weight_format: WeightFormat) -> None:
    for is_gated in (False, True):
        num_bytes = packed_linear.cpu_packed_num_bytes(weight_format, 192, 576, is_gated)
        assert num_bytes == 192 * row_num_bytes(weight_format, 576)


@all_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_and_dtype(each_isa: Executor, weight_format: WeightFormat, dtype: torch.dtype) -> None:
    weight, _ = random_weight(weight_format, 45, 96)
    x, bias = torch.randn(19, 96).to(dtype), torch.randn(45).to(dtype)
    plain = packed_linear.cpu_packed_logits(x, weight)
    assert plain.dtype is torch.float32
    assert torch.equal(packed_linear.cpu_packed_linear(x, weight, None), plain.to(dtype))
    assert torch.equal(packed_linear.cpu_packed_linear(x, weight, bias), (plain + bias.float()).to(dtype))


@all_formats
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("num_outputs", [2, 32, 90])
def test_gates(each_isa: Executor, weight_format: WeightFormat, activation: Activation, num_outputs: int) -> None:
    rows = random_rows(weight_format, num_outputs, 96)
    gated, plain = packed(rows, weight_format, 96, is_gated=True), packed(rows, weight_format, 96)
    x, bias = torch.randn(35, 96), torch.randn(num_outputs)
    for each_bias in (None, bias):
        gate_up = packed_linear.cpu_packed_linear(x, plain, each_bias).double()
        expected = silu_mul(gate_up) if activation is Activation.SILU else gelu_mul(gate_up)
        got = packed_linear.cpu_packed_gated_linear(x, gated, activation, each_bias)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@all_formats
def test_rows_may_be_packed_in_any_parts(each_isa: Executor, weight_format: WeightFormat) -> None:
    rows = random_rows(weight_format, 90, 64)
    for is_gated in (False, True):
        whole = packed(rows, weight_format, 64, is_gated)
        parts = whole._replace(data=torch.zeros_like(whole.data))
        for first, end in ((50, 90), (0, 7), (7, 50)):
            packed_linear.cpu_pack_rows(parts, first, rows[first:end])
        assert torch.equal(parts.data, whole.data)


@all_formats
def test_rows_are_independent(instruction_set: str, weight_format: WeightFormat) -> None:
    EXECUTOR.start(2, instruction_set)
    weight, _ = random_weight(weight_format, 70, 288)
    gated, _ = random_weight(weight_format, 70, 288, is_gated=True)
    x = torch.randn(512, 288).bfloat16()
    cpu_kernels.assert_rows_are_independent(
        lambda x: (
            packed_linear.cpu_packed_logits(x, weight),
            packed_linear.cpu_packed_gated_linear(x, gated, Activation.SILU, None),
        ),
        [x],
    )
    EXECUTOR.start(1)


@all_formats
def test_replayed_with_fewer_rows(executor: Executor, weight_format: WeightFormat) -> None:
    weight, _ = random_weight(weight_format, 70, 96)
    cpu_kernels.assert_replays(
        lambda x: packed_linear.cpu_packed_linear(x, weight, None),
        [torch.randn(64, 96).bfloat16()],
        (1, 2, 3, 17, 40, 64),
    )


@all_formats
def test_instruction_sets_have_the_same_bits(weight_format: WeightFormat) -> None:
    """Those that have FMA."""
    with_fma = [name for name in cpu_kernels.supported_instruction_sets() if name != "portable"]
    rows = random_rows(weight_format, 77, 1600)
    x = torch.cat((torch.randn(40, 1600), 1e-3 * torch.randn(9, 1600), torch.full((1, 1600), 5.0)))
    results = []
    for name in with_fma:
        EXECUTOR.start(2, name)
        weight = packed(rows, weight_format, 1600)
        results += [packed_linear.cpu_packed_linear(x, weight, None)]
        results += [torch.cat([packed_linear.cpu_packed_linear(part, weight, None) for part in x.split(7)])]
    EXECUTOR.start(1)
    for result in results[1:]:
        cpu_kernels.assert_same_bits([result], results[:1])


def extreme_codes(weight_format: WeightFormat) -> torch.Tensor:
    """Return rows with a scale of 1 and nothing but the least or the greatest code."""
    heads = torch.tensor([1.0, 0.0] if weight_format is WeightFormat.Q4_1 else [1.0]).half().view(torch.uint8)
    num_code_bytes = row_num_bytes(weight_format, 32) - len(heads)
    codes = [0x80, 0x7F] if weight_format is WeightFormat.Q8_0 else [0x00, 0xFF]
    rows = [torch.cat((heads, torch.full((num_code_bytes,), code, dtype=torch.uint8))) for code in codes]
    return torch.stack(rows).repeat(1, 4)


@all_formats
def test_no_sum_of_extreme_codes_saturates(each_isa: Executor, weight_format: WeightFormat) -> None:
    rows = extreme_codes(weight_format)
    weight, weights = packed(rows, weight_format, 128), dequantize_rows(rows, weight_format)
    for num_tokens in (1, 3, 8, 32):
        for value in (float(LARGEST_CODE), -float(LARGEST_CODE)):
            x = torch.full((num_tokens, 128), value)
            expected = x.double() @ weights.double().t()
            assert torch.equal(packed_linear.cpu_packed_linear(x, weight, None), expected.float())


@all_formats
def test_an_outlier_spoils_only_what_shares_its_scale(each_isa: Executor, weight_format: WeightFormat) -> None:
    weight, weights = random_weight(weight_format, 64, 320)
    x = torch.randn(33, 320)
    x[:, 37] *= 1e4
    assert_product(packed_linear.cpu_packed_linear(x, weight, None), x, weights)


@all_formats
def test_zeros(each_isa: Executor, weight_format: WeightFormat) -> None:
    weight, _ = random_weight(weight_format, 64, 96)
    for num_tokens in (1, 8, 40):
        for value in (0.0, -0.0, 1e-40):
            x = torch.full((num_tokens, 96), value)
            assert torch.equal(packed_linear.cpu_packed_linear(x, weight, None), torch.zeros(num_tokens, 64))


@all_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_poisons_its_own_row(
    each_isa: Executor, weight_format: WeightFormat, dtype: torch.dtype, value: float
) -> None:
    weight, _ = random_weight(weight_format, 64, 96)
    for num_tokens in (3, 8, 40):
        x = torch.randn(num_tokens, 96).to(dtype)
        clean = packed_linear.cpu_packed_linear(x, weight, None)
        for row in (0, num_tokens - 1):
            poisoned = x.clone()
            poisoned[row, 41] = value
            y = packed_linear.cpu_packed_linear(poisoned, weight, None)
            assert not y[row].isfinite().any()
            others = torch.arange(num_tokens) != row
            assert torch.equal(y[others], clean[others])


@all_formats
def test_embedding_has_the_bits_of_the_widened_rows(each_isa: Executor, weight_format: WeightFormat) -> None:
    weight, weights = random_weight(weight_format, 77, 96)
    token_ids = torch.tensor([0, 76, 31, 32, 5, 5])
    for dtype in (torch.float32, torch.bfloat16):
        got = packed_linear.cpu_packed_embedding(token_ids, weight, dtype)
        cpu_kernels.assert_same_bits([got], [weights[token_ids].to(dtype)])
    for outside in (-1, 77):
        with pytest.raises(IndexError):
            packed_linear.cpu_packed_embedding(torch.tensor([0, outside]), weight, torch.float32)


def test_errors_name_what_is_wrong(each_isa: Executor) -> None:
    weight, _ = random_weight(WeightFormat.Q4_1, 8, 64)
    with pytest.raises(ValueError, match="48 inputs"):
        packed_linear.cpu_packed_num_bytes(WeightFormat.Q4_1, 8, 48, False)
    with pytest.raises(ValueError, match="7 outputs"):
        packed_linear.cpu_packed_num_bytes(WeightFormat.Q4_1, 7, 64, True)
    with pytest.raises(ValueError, match="x is"):
        packed_linear.cpu_packed_linear(torch.zeros(2, 32), weight, None)
    with pytest.raises(ValueError, match="rows are"):
        packed_linear.cpu_pack_rows(weight, 0, torch.zeros(1, 64))
    with pytest.raises(IndexError, match="rows 7 to 9"):
        packed_linear.cpu_pack_rows(weight, 7, torch.zeros(2, 40, dtype=torch.uint8))
    with pytest.raises(ValueError, match="float16"):
        packed_linear.cpu_packed_linear(torch.zeros(2, 64).half(), weight, None)


def test_no_rows(each_isa: Executor) -> None:
    weight: PackedWeight = random_weight(WeightFormat.Q4_0, 8, 64)[0]
    assert packed_linear.cpu_packed_linear(torch.zeros(0, 64), weight, None).shape == (0, 8)
