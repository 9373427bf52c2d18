"""Inputs for tests of Triton kernels on dense tensors: on the device that runs the kernels, with NaN all around."""

from __future__ import annotations

import torch
import triton

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GAP = 3  # elements between rows, and rows before and after, that belong to nobody
POISON = {torch.int64: 2**40, torch.int32: 2**30}


def random_input(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def random_uniforms(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(num_rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def among_poison(x: torch.Tensor) -> torch.Tensor:
    """Return a view equal to `x` into memory that is NaN (for integers absurd) before, between and after its rows."""
    padded_shape = [x.shape[0] + 2 * GAP, *x.shape[1:]]
    if x.dim() > 1:
        padded_shape[-1] += 2 * GAP
    memory = torch.full(padded_shape, POISON.get(x.dtype, torch.nan), dtype=x.dtype, device=x.device)
    view = memory[GAP : GAP + x.shape[0]]
    if x.dim() > 1:
        view = view[..., GAP : GAP + x.shape[-1]]
    return view.copy_(x)
