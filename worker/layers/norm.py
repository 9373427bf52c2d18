"""RMSNorm, alone or joined with the addition of the residual that precedes it (Zhang and Sennrich 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from octavo.kernels.ops.norm import rms_norm
from octavo.worker.layers.linear_weight import WeightFactory
from octavo.worker.layers.weight_slot import WeightSlot, load_into


class RmsNorm(nn.Module):
    """Scale each row to unit root mean square, then by the weight."""

    def __init__(self, hidden_size: int, eps: float, make: WeightFactory) -> None:
        super().__init__()
        self.eps = eps
        self.name = f"{make.prefix}weight"
        self.weight = make.vector(hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> the same."""
        return rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and x + residual."""
        return rms_norm(x, self.weight, self.eps, residual)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(self.name, tuple(self.weight.shape), partial(load_into, self.weight))
