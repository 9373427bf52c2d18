"""What the tests of several kernels need: comparing with float64, and where bits are promised."""

from pathlib import Path

import pytest
import torch

from octavo.kernels.tolerances import TOLERANCES

DTYPES = (torch.float32, torch.bfloat16)

CPU_INFO = Path("/proc/cpuinfo")
IS_MEASURED_CPU = (
    torch.backends.cpu.get_cpu_capability() == "AVX512" and CPU_INFO.exists() and "GenuineIntel" in CPU_INFO.read_text()
)
needs_steady_products = pytest.mark.xfail(
    not IS_MEASURED_CPU,
    reason="the reference leans on how MKL and oneDNN sum on Intel CPUs with AVX-512; other CPUs sum otherwise",
    strict=False,
)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with a float64 result, within the tolerance of the dtype of `got`."""
    assert expected.dtype == torch.float64
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance.absolute, rtol=tolerance.relative)


def random_tensor(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
