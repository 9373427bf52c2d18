"""Root mean square normalisation (Zhang and Sennrich 2019), alone or joined with the residual before it."""

from __future__ import annotations

import torch

from octavo.kernels.registry import op


@op
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scale each row to unit root mean square, then by the weight; computed in fp32.

    Args:
        x: [..., hidden_size].
        weight: [hidden_size].
        eps: added to the mean square.
        residual: when given, is added to x first: [..., hidden_size].

    Returns:
        The norm, in the dtype of x; with a residual, (norm of the sum, the sum).
    """
    total = x if residual is None else x + residual
    wide = total.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = weight * (wide * inverse).to(x.dtype)
    return normed if residual is None else (normed, total)
