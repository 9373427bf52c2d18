"""Products with bfloat16 and fp32 weights on the CPU against float64, and where their bits must not change."""

import cpu_kernels
import pytest
import torch
from kernel_checks import DTYPES, assert_close, random_tensor
from torch.nn import functional

from octavo.kernels.cpu.packed_linear import (
    cpu_pack_rows,
    cpu_packed_gated_linear,
    cpu_packed_linear,
    cpu_packed_logits,
    cpu_packed_num_bytes,
)
from octavo.kernels.ops.packed_linear import Activation, PackedWeight, WeightFormat

SHAPES = ((1, 1), (17, 33), (31, 6), (48, 100), (100, 32), (576, 80), (1536, 64))
"""num_inputs, num_outputs; the last has more inputs than a kernel takes in one part."""
NUMS_ROWS = (1, 15, 33, 70)
FORMATS = {torch.float32: WeightFormat.FLOAT32, torch.bfloat16: WeightFormat.BFLOAT16}


def weight_of(rows: torch.Tensor, is_gated: bool = False, rows_at_a_time: int = 1000) -> PackedWeight:
    """Pack rows, a few at a time."""
    weight_format = FORMATS[rows.dtype]
    data = torch.zeros(cpu_packed_num_bytes(weight_format, *rows.shape, is_gated), dtype=torch.uint8)
    weight = PackedWeight(data, weight_format, *rows.shape, is_gated)
    for first in range(0, len(rows), rows_at_a_time):
        cpu_pack_rows(weight, first, rows[first : first + rows_at_a_time])
    return weight


def random_rows(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Return weights whose products with rows of size 1 are of size 1."""
    return (random_tensor(num_outputs, num_inputs, dtype=torch.float32, seed=1) / num_inputs**0.5).to(dtype)


def product(x: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    sums = x.double() @ rows.double().t()
    return sums if bias is None else sums + bias.double()


def gated_product(
    x: torch.Tensor, rows: torch.Tensor, activation: Activation, bias: torch.Tensor | None = None
) -> torch.Tensor:
    gate, up = product(x, rows, bias).chunk(2, dim=-1)
    is_silu = activation is Activation.SILU
    return (functional.silu(gate) if is_silu else functional.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_equals_float64(each_isa, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    num_inputs, num_outputs = shape
    rows, bias = random_rows(num_outputs, num_inputs, dtype), random_tensor(num_outputs, dtype=dtype, seed=2)
    weight = weight_of(rows)
    for num_rows in NUMS_ROWS:
        x = random_tensor(num_rows, num_inputs, dtype=dtype)
        assert_close(cpu_packed_linear(x, weight), product(x, rows))
        assert_close(cpu_packed_linear(x, weight, bias), product(x, rows, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("shape", [(48, 100), (31, 6), (100, 32), (576, 192)], ids=str)
def test_gated_linear_equals_float64(
    each_isa, dtype: torch.dtype, activation: Activation, shape: tuple[int, int]
) -> None:
    num_inputs, num_outputs = shape
    rows, bias = random_rows(num_outputs, num_inputs, dtype), random_tensor(num_outputs, dtype=dtype, seed=2)
    weight = weight_of(rows, is_gated=True)
    for num_rows in NUMS_ROWS:
        x = random_tensor(num_rows, num_inputs, dtype=dtype) * 3
        assert_close(cpu_packed_gated_linear(x, weight, activation), gated_product(x, rows, activation))
        got = cpu_packed_gated_linear(x, weight, activation, bias)
        assert_close(got, gated_product(x, rows, activation, bias))


def test_large_gates_open_and_close(each_isa) -> None:
    rows = torch.tensor([[1.0], [1.0]])
    x = torch.tensor([[-1e4], [-200.0], [-90.0], [90.0], [200.0], [1e4]])
    for activation in Activation:
        got = cpu_packed_gated_linear(x, weight_of(rows, is_gated=True), activation)
        torch.testing.assert_close(got, torch.where(x > 0, x * x, 0.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_fp32(each_isa, dtype: torch.dtype) -> None:
    rows, hidden = random_rows(1000, 96, dtype), random_tensor(5, 96, dtype=dtype)
    logits = cpu_packed_logits(hidden, weight_of(rows))
    assert logits.dtype is torch.float32
    assert_close(logits, product(hidden, rows))


def test_logits_that_are_in_use_keep_their_memory(each_isa) -> None:
    weight = weight_of(random_rows(40, 32, torch.float32))
    first = cpu_packed_logits(torch.ones(2, 32), weight)
    kept, part = first.clone(), first[:1]
    del first
    second = cpu_packed_logits(torch.zeros(2, 32), weight)
    assert torch.equal(part, kept[:1])
    assert not second.any()


def test_memory_of_logits_is_used_again(each_isa) -> None:
    weight, hidden = weight_of(random_rows(40, 32, torch.float32)), torch.ones(2, 32)
    address = cpu_packed_logits(hidden, weight).data_ptr()
    assert cpu_packed_logits(hidden, weight).data_ptr() == address


def test_bf16_rows_times_fp32_weight(each_isa) -> None:
    rows, x = random_rows(40, 50, torch.float32), random_tensor(20, 50, dtype=torch.bfloat16)
    assert_close(cpu_packed_linear(x, weight_of(rows)), product(x, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(48, 100), (576, 192), (1536, 32)], ids=str)
def test_rows_are_independent(each_isa, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    num_inputs, num_outputs = shape
    rows, bias = random_rows(num_outputs, num_inputs, dtype), random_tensor(num_outputs, dtype=dtype, seed=2)
    plain, gated = weight_of(rows), weight_of(rows, is_gated=True)
    x = random_tensor(512, num_inputs, dtype=dtype)

    def products(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            cpu_packed_linear(x, plain, bias),
            cpu_packed_gated_linear(x, gated, Activation.SILU),
            cpu_packed_logits(x, plain),
        )

    cpu_kernels.assert_rows_are_independent(products, [x])


@pytest.mark.parametrize("num_inputs", [48, 576], ids=str)
def test_every_small_number_of_rows_gives_the_same_bits(each_isa, num_inputs: int) -> None:
    weight = weight_of(random_rows(96, num_inputs, torch.bfloat16))
    x = random_tensor(70, num_inputs, dtype=torch.bfloat16)
    together = cpu_packed_linear(x, weight)
    for num_rows in range(1, 70):
        cpu_kernels.assert_same_bits([cpu_packed_linear(x[-num_rows:], weight)], [together[-num_rows:]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replays_of_fewer_rows(executor, dtype: torch.dtype) -> None:
    rows, bias = random_rows(100, 576, dtype), random_tensor(100, dtype=dtype, seed=2)
    plain, gated = weight_of(rows), weight_of(rows, is_gated=True)

    def products(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return cpu_packed_linear(x, plain, bias), cpu_packed_gated_linear(x, gated, Activation.GELU, bias)

    cpu_kernels.assert_replays(products, [random_tensor(70, 576, dtype=dtype)], (1, 2, 31, 33, 70))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_around_the_result_is_not_touched(each_isa, dtype: torch.dtype) -> None:
    for num_outputs in (1, 17, 33, 48):
        memory = torch.full((5 * num_outputs + 64,), 7.0, dtype=dtype)
        weight = weight_of(torch.ones(num_outputs, 3, dtype=dtype))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(each_isa, "empty", lambda shape, dtype, memory=memory: memory[32:-32].view(shape))
            assert cpu_packed_linear(torch.ones(5, 3, dtype=dtype), weight).eq(3).all()
        assert memory[:32].eq(7).all()
        assert memory[-32:].eq(7).all()


def test_what_lies_behind_a_row_is_not_multiplied(each_isa) -> None:
    memory = torch.full((2, 17), torch.nan, dtype=torch.bfloat16)
    memory[0] = 1
    weight = weight_of(torch.ones(20, 17, dtype=torch.bfloat16))
    assert cpu_packed_linear(memory[:1], weight).eq(17).all()


def test_one_bad_row_spoils_no_other(each_isa) -> None:
    weight = weight_of(random_rows(64, 64, torch.bfloat16))
    x = random_tensor(40, 64, dtype=torch.bfloat16)
    expected = cpu_packed_linear(x, weight)
    x[20] = torch.inf
    got = cpu_packed_linear(x, weight)
    others = [row for row in range(40) if row != 20]
    cpu_kernels.assert_same_bits([got[others]], [expected[others]])
