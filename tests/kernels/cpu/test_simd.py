"""The functions of simd.h, compiled for each instruction set as the library is."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from native_build import COMPILER, build_library

SOURCE = Path(__file__).with_name("simd_functions.cpp")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def libraries() -> dict[str, ctypes.CDLL]:
    """Compiled once for all tests, by instruction set."""
    return {}


@pytest.fixture
def functions(instruction_set, libraries, tmp_path_factory) -> ctypes.CDLL:
    if instruction_set not in libraries:
        path = tmp_path_factory.mktemp(instruction_set) / "simd.so"
        libraries[instruction_set] = ctypes.CDLL(str(build_library([SOURCE], instruction_set, path)))
    return libraries[instruction_set]


def apply(functions: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(x) // 16) * 16, np.float32)
    padded[: len(x)] = x
    result = np.zeros_like(padded)
    pointers = (ctypes.c_void_p(each.ctypes.data) for each in (padded, result))
    getattr(functions, f"apply_{name}")(*pointers, ctypes.c_int64(len(padded)))
    return result[: len(x)]


def largest_error_ulp(got: np.ndarray, expected: np.ndarray) -> float:
    return float((np.abs(got - expected) / np.spacing(np.abs(expected).astype(np.float32))).max())


@pytest.mark.parametrize(
    ("name", "function", "low", "high", "limit_ulp"),
    [
        ("exp", np.exp, -87.3, 88.72, 2.0),
        ("exp", np.exp, -1.0, 1.0, 2.0),
        ("tanh", np.tanh, -12.0, 12.0, 2.0),
        ("tanh", np.tanh, -1e-3, 1e-3, 2.0),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x)), -87.0, 87.0, 4.0),
    ],
)
def test_functions_are_exact_to_a_few_units_in_the_last_place(functions, name, function, low, high, limit_ulp) -> None:
    x = np.linspace(low, high, 1_000_000).astype(np.float32).clip(np.float32(low), np.float32(high))
    x = x[(x >= low) & (x <= high)]
    assert largest_error_ulp(apply(functions, name, x), function(x.astype(np.float64))) < limit_ulp


def test_functions_of_special_numbers(functions) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, -87.4, -1e30, 88.8, 1e30], np.float32)
    assert np.array_equal(apply(functions, "exp", x), [np.nan, np.inf, 0, 1, 1, 0, 0, np.inf, np.inf], equal_nan=True)
    assert np.array_equal(apply(functions, "tanh", x), [np.nan, 1, -1, 0, 0, -1, -1, 1, 1], equal_nan=True)


def test_rounding_to_bfloat16_is_torchs(functions) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 1_000_000, dtype=np.uint32)
    x = bits.view(np.float32)
    x = x[(np.abs(x) >= 2.0**-126) | np.isnan(x)]
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    assert np.array_equal(apply(functions, "round_to_bf16", x), expected, equal_nan=True)


def test_reductions_have_one_order(functions) -> None:
    x = np.random.default_rng(1).standard_normal((150, 16)).astype(np.float32)
    got = apply(functions, "reductions", x.ravel()).reshape(150, 16)
    sums = x
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    assert np.array_equal(got[:, 15], sums[:, 0])
    assert np.array_equal(got[:, 14], x.max(1))
    for row, copied in enumerate(got):
        count = row % 15
        assert np.array_equal(copied[: min(count, 14)], x[row, : min(count, 14)])
        assert not copied[count:14].any()
