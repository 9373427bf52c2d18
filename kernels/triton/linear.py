"""Matrix products of the layers on a GPU: the vendor's library."""

from __future__ import annotations

import torch
from torch.nn import functional

from octavo.kernels.ops.linear import head_logits, linear
from octavo.kernels.registry import backend


@backend("triton", implements=linear)
def library_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The library's product, which chooses its algorithm by shape."""
    return functional.linear(x, weight, bias)


@backend("triton", implements=head_logits)
def library_head_logits(hidden: torch.Tensor, weight: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """The library's product of operands as they are, accumulated and returned in fp32; no tile is needed."""
    if hidden.dtype is torch.float32:
        return torch.mm(hidden, weight.t())
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
