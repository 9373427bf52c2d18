"""Token embedding, and the head that turns hidden states into logits.

Logits are computed in fp32 whatever the dtype of the model: bfloat16 would round the largest ones to eighths, and
greedy sampling would choose among ties that the model never meant. A tied head shares the embedding's weight, so that
there is one copy of the largest tensor of a small model. Rejected: a second copy of the weight in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from octavo.kernels.ops.linear import linear
from octavo.worker.layers.weight_slot import WeightSlot, empty_parameter, whole_parameter

HEAD_TILE = 2048  # rows of the weight that are in fp32 at a time


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
        # Kept, because fresh memory at every step costs more in page faults than the product.
        self.tile = torch.empty(HEAD_TILE, hidden_size, dtype=torch.float32, device=device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> fp32 [N, vocab_size]."""
        hidden = hidden.float()
        logits = hidden.new_empty(hidden.shape[0], self.weight.shape[0])
        for rows, columns in zip(self.weight.split(HEAD_TILE), logits.split(HEAD_TILE, dim=1), strict=True):
            columns.copy_(linear(hidden, self._in_fp32(rows)))
        return logits

    def _in_fp32(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if rows.dtype is torch.float32 else self.tile[: rows.shape[0]].copy_(rows)

    def weight_slots(self) -> Iterator[WeightSlot]:
        if not self.is_tied:
            yield whole_parameter("weight", self.weight)
