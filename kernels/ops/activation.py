"""The product of a gated feed-forward layer (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import torch
from torch.nn import functional

from octavo.kernels.registry import op


@op
def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up.

    Args:
        gate_up: [..., 2 · I]; the gate, then the up projection.

    Returns:
        [..., I], in the dtype of `gate_up`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
