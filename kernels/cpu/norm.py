"""Root mean square norm on the CPU."""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.arguments import address, element_kind
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.ops.norm import rms_norm
from octavo.kernels.registry import backend


class _RmsNormArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("total", ctypes.c_void_p),
        ("hidden_size", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


@backend("cpu", implements=rms_norm)
def cpu_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    hidden_size = x.shape[-1]
    normed = EXECUTOR.empty(tuple(x.shape), x.dtype)
    total = None if residual is None else EXECUTOR.empty(tuple(x.shape), x.dtype)
    args = _RmsNormArgs(
        address(x),
        address(residual),
        address(weight),
        address(normed),
        address(total),
        hidden_size,
        element_kind(x.dtype),
        eps,
    )
    EXECUTOR.run("rms_norm", args, x.numel() // hidden_size)
    return normed if total is None else (normed, total)
