"""The ranks that share one model: what they tell each other in every step.

Every rank executes the same steps in the same order, so collectives meet without a word. Invariant: the sum of an
all-reduce is taken in the order of the ranks, so that every rank holds the same bits.
"""

from __future__ import annotations

from typing import Protocol

import torch


class TensorParallelGroup(Protocol):
    """The collectives of one group of workers; each blocks, or is ordered on the device's stream."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's `x`, in the order of the ranks; `x` may be overwritten with it."""
        ...

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return every rank's `x` [N, columns] side by side on rank 0, None on the others; widths may differ."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `x`; on the others `x` has its shape and dtype, and is overwritten."""
        ...


class SingleRank:
    """A group of one, which has nobody to talk to."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor | None:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x


SINGLE_RANK: TensorParallelGroup = SingleRank()
