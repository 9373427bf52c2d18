"""The products of gated feed-forward layers (GLU variants, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch.nn import functional

from octavo.kernels.registry import op


@op
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up (SwiGLU).

    Args:
        gate_up: [..., 2 · I]; the gate, then the up projection.

    Returns:
        [..., I], in the dtype of `gate_up`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


@op
def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) · up (GEGLU), with the tanh approximation of GELU (Hendrycks and Gimpel 2016) as Gemma has it.

    Args:
        gate_up: [..., 2 · I]; the gate, then the up projection.

    Returns:
        [..., I], in the dtype of `gate_up`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up
