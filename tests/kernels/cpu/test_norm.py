"""rms_norm on the CPU against float64, and where its bits must not change."""

import cpu_kernels
import pytest
import torch
from kernel_checks import DTYPES, assert_close, random_tensor

from octavo.kernels.cpu.norm import cpu_rms_norm

EPS = 1e-5
SIZES = (1, 7, 16, 40, 64, 80, 576, 1000)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_norm_equals_float64(each_isa, dtype: torch.dtype, size: int) -> None:
    x, weight = random_tensor(37, size, dtype=dtype), random_tensor(size, dtype=dtype, seed=1)
    assert_close(cpu_rms_norm(x, weight, EPS), norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_sum_is_rounded_once_and_normed_as_rounded(each_isa, dtype: torch.dtype, size: int) -> None:
    x, residual = random_tensor(37, size, dtype=dtype), random_tensor(37, size, dtype=dtype, seed=2)
    weight = random_tensor(size, dtype=dtype, seed=1)
    normed, total = cpu_rms_norm(x, weight, EPS, residual)
    cpu_kernels.assert_same_bits([total], [x + residual])
    cpu_kernels.assert_same_bits([normed], [cpu_rms_norm(total, weight, EPS)])


def test_what_lies_around_the_rows_is_not_touched(each_isa) -> None:
    for size in SIZES:
        memory = torch.full((3 * size + 32,), 7.0)
        x = memory[16 : 16 + 3 * size].view(3, size)
        x.copy_(random_tensor(3, size, dtype=torch.float32))
        cpu_rms_norm(x, torch.ones(size), EPS, x)
        assert memory[:16].eq(7).all()
        assert memory[-16:].eq(7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [40, 576])
def test_rows_are_independent(each_isa, dtype: torch.dtype, size: int) -> None:
    weight = random_tensor(size, dtype=dtype, seed=1)
    rows = random_tensor(512, size, dtype=dtype), random_tensor(512, size, dtype=dtype, seed=2)
    cpu_kernels.assert_rows_are_independent(lambda x, residual: cpu_rms_norm(x, weight, EPS, residual), rows)
    cpu_kernels.assert_rows_are_independent(lambda x: cpu_rms_norm(x, weight, EPS), rows[:1], [2, 9, 512])


def test_a_recorded_norm_is_replayed_on_fewer_rows(executor) -> None:
    weight = random_tensor(576, dtype=torch.bfloat16, seed=1)
    rows = random_tensor(70, 576, dtype=torch.bfloat16), random_tensor(70, 576, dtype=torch.bfloat16, seed=2)
    cpu_kernels.assert_replays(lambda x, r: cpu_rms_norm(x, weight, EPS, r), rows, [1, 70, 33, 8, 2])


def test_a_tensor_with_gaps_is_refused(each_isa) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        cpu_rms_norm(torch.ones(4, 32)[:, :16], torch.ones(16), EPS)
