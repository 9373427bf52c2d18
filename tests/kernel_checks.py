"""What the tests of several kernels need: comparing with float64, and paged memory filled with poison."""

import torch

from octavo.kernels.tolerances import TOLERANCES

DTYPES = (torch.float32, torch.bfloat16)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with a float64 result, within the tolerance of the dtype of `got`."""
    assert expected.dtype == torch.float64
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance.absolute, rtol=tolerance.relative)


def random_tensor(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
