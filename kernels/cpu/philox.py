"""Random numbers on the CPU."""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.arguments import address, typed_address
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.ops.philox import philox_uniform
from octavo.kernels.registry import backend


class _PhiloxUniformArgs(ctypes.Structure):
    _fields_ = (
        ("seeds", ctypes.c_void_p),
        ("choice_indices", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("draws", ctypes.c_void_p),
        ("uniforms", ctypes.c_void_p),
    )


@backend("cpu", implements=philox_uniform)
def cpu_philox_uniform(
    seeds: torch.Tensor, choice_indices: torch.Tensor, positions: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    uniforms = EXECUTOR.empty((len(seeds),), torch.float64)
    coordinates = (typed_address(each, torch.int64) for each in (seeds, choice_indices, positions, draws))
    EXECUTOR.run("philox_uniform", _PhiloxUniformArgs(*coordinates, address(uniforms)), len(seeds))
    return uniforms
