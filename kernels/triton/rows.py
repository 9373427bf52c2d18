"""How the kernels of this package see tensors: as rows whose elements lie side by side."""

from __future__ import annotations

import torch


def with_adjacent_elements(x: torch.Tensor) -> torch.Tensor:
    """Return `x` when the elements of its last dimension lie side by side, else a copy for which that holds."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_groups_of_rows(x: torch.Tensor) -> torch.Tensor:
    """Return [..., columns] as [groups, rows, columns] with adjacent elements; heads of a fused tensor uncopied."""
    x = with_adjacent_elements(x)
    return x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
