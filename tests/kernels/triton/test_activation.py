"""silu_mul and gelu_mul on a GPU: against float64 and, in extreme values, against torch."""

import math

import pytest
import torch
from dense_inputs import DEVICE, DTYPES, among_poison, random_input
from kernel_checks import assert_close

from octavo.kernels.ops.activation import gelu_mul, silu_mul
from octavo.kernels.triton.activation import triton_gelu_mul, triton_silu_mul

# numpy warns where a GPU computes infinity without a word
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def silu(gate: torch.Tensor) -> torch.Tensor:
    return gate / (1 + torch.exp(-gate))


def gelu(gate: torch.Tensor) -> torch.Tensor:
    return gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))


KERNELS = pytest.mark.parametrize(
    ("kernel", "reference", "activation"),
    [(triton_silu_mul, silu_mul, silu), (triton_gelu_mul, gelu_mul, gelu)],
    ids=["silu", "gelu"],
)


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (5, 66), (3, 2 * 1024), (2, 2 * 2049), (2, 3, 40)], ids=str)
def test_rows_of_any_length(kernel, reference, activation, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = random_input(*shape, dtype=dtype) * 4

    result = kernel(among_poison(gate_up))

    gate, up = gate_up.double().chunk(2, -1)
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert_close(result, activation(gate) * up)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_where_the_reference_does(kernel, reference, activation, dtype: torch.dtype) -> None:
    """All but where an fp32 value rounds to the other side, and where the reference loses GELU's tail."""
    gate_up = random_input(20, 600, dtype=dtype).clamp(min=-2)
    assert (kernel(gate_up) == reference(gate_up)).double().mean() > 0.999


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_gates(kernel, reference, activation, dtype: torch.dtype) -> None:
    gates = torch.tensor(
        [0.0, -0.0, 1e-40, -1e-40, 30.0, -30.0, -5.0, 88.0, -88.0, 100.0, -100.0, 1e20, -1e20, math.nan]
    )
    gate_up = torch.cat((gates, torch.full_like(gates, 2.0)))[None].to(dtype).to(DEVICE)
    torch.testing.assert_close(kernel(gate_up), reference(gate_up), atol=1e-6, rtol=1e-5, equal_nan=True)


def test_the_tail_of_gelu_keeps_its_precision() -> None:
    """tanh nears -1 there, and 1 + tanh(u) would lose all digits."""
    gate = torch.linspace(-6, -3, 31, device=DEVICE)
    result = triton_gelu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    torch.testing.assert_close(result.double(), gelu(gate.double()), atol=1e-15, rtol=1e-5)


@KERNELS
def test_elements_that_are_not_adjacent(kernel, reference, activation) -> None:
    gate_up = random_input(12, 4).t()
    gate, up = gate_up.double().chunk(2, -1)
    assert_close(kernel(gate_up), activation(gate) * up)


@KERNELS
def test_a_row_has_the_same_bits_in_any_company(kernel, reference, activation) -> None:
    gate_up = random_input(33, 300)
    together = kernel(gate_up)
    for row in (0, 13, 32):
        assert torch.equal(kernel(gate_up[row : row + 1])[0], together[row])
