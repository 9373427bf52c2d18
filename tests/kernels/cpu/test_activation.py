"""silu_mul and gelu_mul on the CPU against float64 and the reference, and where their bits must not change."""

import cpu_kernels
import pytest
import torch
from kernel_checks import DTYPES, assert_close, random_tensor
from torch.nn import functional

from octavo.kernels.cpu.activation import cpu_gelu_mul, cpu_silu_mul

BACKENDS = {"silu": cpu_silu_mul, "gelu": cpu_gelu_mul}


def wide(name: str, gate_up: torch.Tensor) -> torch.Tensor:
    """The reference in float64, with the activation rounded to the dtype as there."""
    gate, up = gate_up.double().chunk(2, -1)
    activated = functional.silu(gate) if name == "silu" else functional.gelu(gate, approximate="tanh")
    return activated.to(gate_up.dtype).double() * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("size", [1, 16, 31, 1536])
def test_products_equal_float64(each_isa, name: str, dtype: torch.dtype, size: int) -> None:
    gate_up = 3 * random_tensor(19, 2 * size, dtype=dtype)
    assert_close(BACKENDS[name](gate_up), wide(name, gate_up))


@pytest.mark.parametrize("name", BACKENDS)
def test_gates_of_any_size(each_isa, name: str) -> None:
    gates = torch.cat((torch.linspace(-120, 120, 2001), torch.tensor([-1e30, -1e4, -0.0, 0.0, 1e-30, 1e4, 1e30])))
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
    got = BACKENDS[name](gate_up)
    torch.testing.assert_close(got.double(), wide(name, gate_up), rtol=4e-6, atol=2e-15)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_rows_are_independent(each_isa, name: str, dtype: torch.dtype) -> None:
    cpu_kernels.assert_rows_are_independent(BACKENDS[name], [random_tensor(512, 2 * 56, dtype=dtype)])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_recorded_product_is_replayed_on_fewer_rows(executor, name: str) -> None:
    rows = [random_tensor(70, 2 * 96, dtype=torch.bfloat16)]
    cpu_kernels.assert_replays(BACKENDS[name], rows, [1, 70, 33, 8, 2])
