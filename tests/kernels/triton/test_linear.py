"""The product of fixed shape: against float64, and a row's bits alone and among others; and the library's product."""

import math

import pytest
import torch
import triton
from dense_inputs import DTYPES, among_poison, random_input
from kernel_checks import assert_close

from octavo.kernels.ops.linear import head_logits, linear
from octavo.kernels.triton.linear import fixed_head_logits, fixed_linear, library_head_logits, library_linear

# numpy warns where a GPU computes infinity without a word
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
IS_INTERPRETED = triton.knobs.runtime.interpret


def weight_like(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return random_input(num_outputs, num_inputs, dtype=dtype, seed=1) / math.sqrt(num_inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"),
    [(0, 16, 8), (1, 1, 1), (1, 64, 64), (5, 576, 70), (33, 31, 33), (129, 65, 65), (2, 130, 200), (140, 200, 10)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_any_size(
    num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight = random_input(num_rows, num_inputs, dtype=dtype), weight_like(num_outputs, num_inputs, dtype)
    bias = random_input(num_outputs, dtype=dtype, seed=2) if has_bias else None

    result = fixed_linear(among_poison(x), among_poison(weight), None if bias is None else among_poison(bias))

    expected = x.double() @ weight.double().t()
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert_close(result, expected if bias is None else expected + bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_fp32_whatever_the_operands(dtype: torch.dtype) -> None:
    """As close to float64 as the operands' own products are, which fp32 holds exactly."""
    hidden, weight = random_input(3, 96, dtype=dtype), weight_like(131, 96, dtype)
    logits = fixed_head_logits(among_poison(hidden), among_poison(weight), torch.empty(0))
    assert logits.dtype == torch.float32
    assert_close(logits, hidden.double() @ weight.double().t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(96, 40), (200, 65)])
def test_a_row_has_the_same_bits_alone_and_among_others(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    x, weight = random_input(200, num_inputs, dtype=dtype), weight_like(num_outputs, num_inputs, dtype)
    bias = random_input(num_outputs, dtype=dtype, seed=2)
    together = fixed_linear(x, weight, bias)
    logits = fixed_head_logits(x, weight, torch.empty(0))
    for num_rows in range(1, 41):
        first = (num_rows * 37) % (200 - num_rows)
        rows = slice(first, first + num_rows)
        assert torch.equal(fixed_linear(x[rows], weight, bias), together[rows]), f"{num_rows} rows from {first}"
    for row in (0, 1, 63, 64, 127, 128, 199):
        assert torch.equal(fixed_head_logits(x[row : row + 1], weight, torch.empty(0))[0], logits[row])


def test_a_row_of_nan_or_infinity_spoils_no_other() -> None:
    x, weight = random_input(40, 70, dtype=torch.bfloat16), weight_like(50, 70, torch.bfloat16)
    expected = fixed_linear(x, weight)
    x[3], x[17, 69] = torch.nan, torch.inf
    result = fixed_linear(x, weight)
    assert result[3].isnan().all()
    assert not result[17].isfinite().any()
    others = [row for row in range(40) if row not in (3, 17)]
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values(dtype: torch.dtype) -> None:
    """Large terms that cancel, and a sum of fp16 that only fp32 can hold on its way."""
    x = torch.tensor([[200.0, -200.0, 1.0, 0.0]], dtype=dtype).repeat(1, 40).to(random_input(1).device)
    weight = torch.full((3, 160), 200.0, dtype=dtype, device=x.device)
    assert fixed_linear(x, weight).tolist() == [[8000.0] * 3]


def test_elements_that_are_not_adjacent() -> None:
    x, weight = random_input(48, 6).t(), random_input(48, 10, seed=1).t()
    assert_close(fixed_linear(x, weight), x.double() @ weight.double().t())


def test_exact_products_in_fp32() -> None:
    """tf32 would keep 10 bits of these numbers."""
    x = torch.tensor([[1 + 2**-20, 2**-20]], device=random_input(1).device)
    assert fixed_linear(x, torch.tensor([[1.0, 0.0], [1.0, -1.0]], device=x.device)).tolist() == [[1 + 2**-20, 1.0]]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16, marks=pytest.mark.skipif(IS_INTERPRETED, reason="only CUDA multiplies bf16 into fp32")
        ),
    ],
)
def test_the_products_of_the_library(dtype: torch.dtype) -> None:
    x, weight, bias = random_input(5, 64, dtype=dtype), weight_like(12, 64, dtype), random_input(12, dtype=dtype)
    expected = x.double() @ weight.double().t()
    logits = library_head_logits(x, weight, torch.empty(0))
    assert logits.dtype == torch.float32
    assert_close(logits, expected)
    assert_close(library_linear(x, weight, bias), expected + bias.double())


def test_deterministic_comes_before_the_library() -> None:
    for op, fixed, library in (
        (linear, fixed_linear, library_linear),
        (head_logits, fixed_head_logits, library_head_logits),
    ):
        assert op.implementations["deterministic"] is fixed
        assert op.implementations["triton"] is library
