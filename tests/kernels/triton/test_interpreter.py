"""The repaired interpreter computes what a GPU computes, on known answers, and refuses what it cannot compute."""

import os

import pytest
import torch
import triton
import triton.language as tl
import triton_interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="about the interpreter")

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


@triton.jit
def cast_kernel(source, destination, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(destination + index, tl.load(source + index).to(destination.dtype.element_ty))


@triton.jit
def dot_kernel(a, b, c, size: tl.constexpr, precision: tl.constexpr):
    index = tl.arange(0, size)
    place = index[:, None] * size + index[None, :]
    tl.store(c + place, tl.dot(tl.load(a + place), tl.load(b + place), input_precision=precision))


@triton.jit
def add_kernel(x, y, out, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, tl.load(x + index) + tl.load(y + index))


@triton.jit
def compare_kernel(x, out, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, (tl.load(x + index) > 1.0).to(tl.float32))


@triton.jit
def absolute_kernel(x, out, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, tl.abs(tl.load(x + index)))


@triton.jit
def scan_kernel(x, out, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, tl.associative_scan(tl.load(x + index), 0, larger))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def double(x):
    return widen(x) * 2.0


@triton.jit
def widen(x):
    return x.to(tl.float32)


@triton.jit
def nested_kernel(x, out, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(out + index, double(tl.load(x + index)))


def converted(values: list[float], source: torch.dtype, destination: torch.dtype) -> torch.Tensor:
    out = torch.zeros(len(values), dtype=destination)
    cast_kernel[(1,)](torch.tensor(values, dtype=source), out, size=len(values))
    return out


def test_bf16_is_rounded_to_nearest_even() -> None:
    values = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.1415926, 3.4e38, float("inf"), 1e-40]
    expected = [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -3.140625, float("inf"), float("inf"), 1e-40]
    assert converted(values, torch.float32, BF16).tolist() == torch.tensor(expected, dtype=BF16).tolist()


def test_bf16_nan_stays_nan() -> None:
    assert converted([float("nan")] * 2, torch.float32, BF16).isnan().all()


@pytest.mark.parametrize("destination", [torch.float32, torch.float16, torch.float64, torch.int32])
def test_bf16_is_decoded(destination: torch.dtype) -> None:
    assert converted([1.0, -2.5, 96.0, 0.0], BF16, destination).tolist() == (
        torch.tensor([1.0, -2.5, 96.0, 0.0]).to(destination).tolist()
    )


@pytest.mark.parametrize("source", [torch.float32, BF16, torch.float16])
def test_fp8_carries_and_saturates(source: torch.dtype) -> None:
    values = [31.875, 500.0, -1e4, 2.0**-9, float("inf"), 17.0, 0.0, 448.0]
    expected = [32.0, 448.0, -448.0, 2.0**-9, 448.0, 16.0, 0.0, 448.0]
    assert converted(values, source, E4M3).float().tolist() == expected


def test_fp8_with_two_bits_saturates() -> None:
    assert converted([7.5, 1e6, -1e6, 2.0**-16], torch.float32, E5M2).float().tolist() == [8, 57344, -57344, 2.0**-16]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_code_of_fp8_is_decoded(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    out = torch.zeros(256)
    cast_kernel[(1,)](codes, out, size=256)
    torch.testing.assert_close(out, codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16, E4M3, E5M2])
def test_dot_is_exact_where_a_gpu_is(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (16, 16), generator=generator).to(dtype) for _ in range(2))
    out = torch.zeros(16, 16)
    dot_kernel[(1,)](a, b, out, size=16, precision="ieee")
    assert torch.equal(out, a.float() @ b.float())


@pytest.mark.parametrize(("precision", "expected"), [("ieee", 1 + 2**-12), ("tf32", 1.0)])
def test_dot_of_fp32_is_as_coarse_as_asked_for(precision: str, expected: float) -> None:
    out = torch.zeros(16, 16)
    dot_kernel[(1,)](torch.eye(16) * (1 + 2**-12), torch.eye(16), out, size=16, precision=precision)
    assert torch.equal(out, torch.eye(16) * expected)


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_arithmetic_on_encoded_types_is_refused(dtype: torch.dtype) -> None:
    x, out = torch.ones(16).to(dtype), torch.zeros(16).to(dtype)
    refused = pytest.raises(triton_interpreter.UnsupportedArithmeticError, match=r"write \.to\(tl\.float32\) first")
    with refused:
        add_kernel[(1,)](x, x, out, size=16)
    with refused:
        compare_kernel[(1,)](x, torch.zeros(16), size=16)
    with refused:
        absolute_kernel[(1,)](x, out, size=16)
    with refused:
        scan_kernel[(1,)](x, out, size=16)


def test_fp32_arithmetic_is_left_alone() -> None:
    x = torch.tensor([-1.0, 2.0, 0.5, 1.5])
    out = torch.zeros(4)
    add_kernel[(1,)](x, x, out, size=4)
    assert torch.equal(out, x * 2)
    compare_kernel[(1,)](x, out, size=4)
    assert out.tolist() == [0, 1, 0, 1]
    scan_kernel[(1,)](x, out, size=4)
    assert out.tolist() == [-1, 2, 2, 2]


def test_device_functions_are_repaired_too() -> None:
    out = torch.zeros(4)
    nested_kernel[(1,)](torch.tensor([1.5, -2.0, 0.25, 3.0], dtype=BF16), out, size=4)
    assert out.tolist() == [3.0, -4.0, 0.5, 6.0]


def test_installing_again_changes_nothing() -> None:
    before = dict(vars(InterpreterBuilder)), GridExecutor.__call__
    triton_interpreter.install()
    assert (dict(vars(InterpreterBuilder)), GridExecutor.__call__) == before


def test_programs_that_tests_start_are_not_told() -> None:
    assert "TRITON_INTERPRET" not in os.environ
