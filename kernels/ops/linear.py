"""Matrix products of the layers."""

from __future__ import annotations

import torch
from torch.nn import functional

from octavo.kernels.registry import op


@op
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x Wᵀ + b.

    Args:
        x: [num_tokens, in].
        weight: [out, in].
        bias: [out], or None.

    Returns:
        [num_tokens, out].
    """
    return functional.linear(x, weight, bias)
