"""The products of gated feed-forward layers on the CPU."""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.arguments import address, element_kind
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.ops.activation import gelu_mul, silu_mul
from octavo.kernels.registry import backend


class _GatedArgs(ctypes.Structure):
    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("product", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
    )


def _multiply(kernel: str, gate_up: torch.Tensor) -> torch.Tensor:
    size = gate_up.shape[-1] // 2
    product = EXECUTOR.empty((*gate_up.shape[:-1], size), gate_up.dtype)
    args = _GatedArgs(address(gate_up), address(product), size, element_kind(gate_up.dtype))
    EXECUTOR.run(kernel, args, gate_up.numel() // gate_up.shape[-1])
    return product


@backend("cpu", implements=silu_mul)
def cpu_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _multiply("silu_mul", gate_up)


@backend("cpu", implements=gelu_mul)
def cpu_gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return _multiply("gelu_mul", gate_up)
