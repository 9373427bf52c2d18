"""Token embedding, and the head that turns hidden states into logits.

Logits are fp32 whatever the dtype of the model, because sampling compares and exponentiates them. A tied head shares
the embedding's weight, so that there is one copy of the largest tensor of a small model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from octavo.kernels.ops.linear import linear
from octavo.worker.layers.weight_slot import WeightSlot, empty_parameter, whole_parameter


class Embedding(nn.Module):
    """Rows of a table, by token id."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden_size]; raises IndexError for an id that is not in the vocabulary."""
        return torch.embedding(self.weight, token_ids)

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield whole_parameter("weight", self.weight)


class OutputHead(nn.Module):
    """Hidden states to logits; with the embedding's weight when that is `tied_weight`, else with its own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tied_weight: nn.Parameter | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.is_tied = tied_weight is not None
        self.weight = (
            empty_parameter(vocab_size, hidden_size, dtype=dtype, device=device) if tied_weight is None else tied_weight
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> fp32 [N, vocab_size]."""
        return linear(hidden, self.weight).float()

    def weight_slots(self) -> Iterator[WeightSlot]:
        if not self.is_tied:
            yield whole_parameter("weight", self.weight)
