"""rms_norm on a GPU: against float64, rows of any length and stride, and bits that do not depend on other rows."""

import pytest
import torch
from dense_inputs import DEVICE, DTYPES, among_poison, random_input
from kernel_checks import assert_close

from octavo.kernels.ops.norm import rms_norm
from octavo.kernels.triton.norm import triton_rms_norm

EPS = 1e-5


def expected_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (1, 64), (9, 63), (65, 128), (3, 1537), (2, 4096)], ids=str)
def test_rows_of_any_length(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random_input(*shape, dtype=dtype), random_input(shape[1], dtype=dtype, seed=1)

    normed = triton_rms_norm(among_poison(x), among_poison(weight), EPS)

    assert normed.dtype == dtype
    assert normed.shape == x.shape
    assert normed.is_contiguous()
    assert_close(normed, expected_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 70), (17, 96), (2, 1500)], ids=str)
def test_the_residual_is_added_first_and_returned(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = random_input(*shape, dtype=dtype), random_input(*shape, dtype=dtype, seed=1)
    weight = random_input(shape[1], dtype=dtype, seed=2)
    before = x.clone(), residual.clone()

    normed, total = triton_rms_norm(among_poison(x), weight, EPS, among_poison(residual))

    assert torch.equal(total, x + residual)
    assert_close(normed, expected_norm(total, weight))
    assert torch.equal(normed, triton_rms_norm(total, weight, EPS))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_a_fused_projection(dtype: torch.dtype) -> None:
    fused, weight = among_poison(random_input(5, 9, 24, dtype=dtype)), random_input(24, dtype=dtype, seed=1)
    key, residual = fused[:, 4:7], random_input(5, 3, 24, dtype=dtype, seed=2)

    normed, total = triton_rms_norm(key, weight, EPS, residual)

    assert torch.equal(total, key + residual)
    assert_close(normed, expected_norm(total, weight))
    assert_close(triton_rms_norm(key, weight, EPS), expected_norm(key, weight))


def test_any_number_of_dimensions_and_any_strides() -> None:
    weight = random_input(20, seed=1)
    for x in (random_input(20), random_input(2, 3, 4, 20), random_input(20, 6).t(), random_input(6, 40)[:, ::2]):
        assert_close(triton_rms_norm(x, weight, EPS), expected_norm(x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_where_the_reference_does(dtype: torch.dtype) -> None:
    x, residual = random_input(40, 200, dtype=dtype), random_input(40, 200, dtype=dtype, seed=1)
    weight = random_input(200, dtype=dtype, seed=2)
    normed, total = triton_rms_norm(x, weight, EPS, residual)
    expected_normed, expected_total = rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, expected_total)
    assert (normed == expected_normed).double().mean() > 0.999  # an fp32 sum may round to the other side


def test_extreme_values() -> None:
    tiny = torch.full((1, 64), 1e-40, device=DEVICE)
    large = torch.full((1, 64), 3e4, dtype=torch.bfloat16, device=DEVICE)
    hot = torch.zeros(1, 64, dtype=torch.float16, device=DEVICE)
    hot[0, 63] = 65504.0
    nan = random_input(3, 64)
    nan[1, 5] = torch.nan
    assert_close(triton_rms_norm(tiny, torch.ones(64, device=DEVICE), EPS), torch.zeros(1, 64).double().to(DEVICE))
    for x in (large, hot):
        weight = torch.ones(64, dtype=x.dtype, device=DEVICE)
        assert_close(triton_rms_norm(x, weight, EPS), expected_norm(x, weight))
    is_nan = triton_rms_norm(nan, torch.ones(64, device=DEVICE), EPS).isnan().all(-1)
    assert is_nan.tolist() == [False, True, False]


def test_a_row_has_the_same_bits_in_any_company() -> None:
    for row_size in (24, 1500):
        x, weight = random_input(50, row_size), random_input(row_size, seed=1)
        together = triton_rms_norm(x, weight, EPS)
        for first, end in ((0, 1), (7, 8), (3, 20), (49, 50)):
            assert torch.equal(triton_rms_norm(x[first:end], weight, EPS), together[first:end])
