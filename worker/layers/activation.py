"""The gated activation of a feed-forward layer (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch import nn

from octavo.kernels.ops.activation import silu_mul


class SiluAndMul(nn.Module):
    """silu(gate) · up, of the two halves of a fused projection."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 · intermediate_size] -> [T, intermediate_size]."""
        return silu_mul(gate_up)
