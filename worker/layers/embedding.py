"""Token embedding, and the head that turns hidden states into logits; each rank has its run of the vocabulary.

Logits are computed in fp32 whatever the dtype of the model: bfloat16 would round the largest ones to eighths, and
greedy sampling would choose among ties that the model never meant. A tied head shares the embedding's weight, so that
there is one copy of the largest tensor of a small model; both are cut alike. Rejected: a second copy of the weight in
fp32; logits on every rank, since rank 0 alone samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from octavo.kernels.ops.linear import head_logits
from octavo.worker.distributed import SINGLE_RANK, TensorParallelGroup
from octavo.worker.layers.shares import split_size
from octavo.worker.layers.weight_slot import WeightSlot, empty_parameter

HEAD_TILE = 2048  # rows of the weight that are in fp32 at a time


def split_vocabulary(vocab_size: int, group: TensorParallelGroup) -> list[range]:
    """Return the token ids of every rank."""
    return split_size("vocab_size", vocab_size, group.size)


class Embedding(nn.Module):
    """Rows of a table, by token id. A rank looks up what it has, and the sum over the ranks fills in the rest."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group = group
        self.own_ids = split_vocabulary(vocab_size, group)[group.rank]
        self.weight = empty_parameter(len(self.own_ids), hidden_size, dtype=dtype, device=device)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden_size]; raises IndexError for an id that is not in the vocabulary.

        In a group, the rank raises that is nearest to the id.
        """
        if self.group.size == 1:
            return torch.embedding(self.weight, token_ids)
        is_other = self._is_other(token_ids)
        rows = torch.embedding(self.weight, (token_ids - self.own_ids.start).masked_fill_(is_other, 0))
        return self.group.all_reduce(rows.masked_fill_(is_other[:, None], 0))

    def _is_other(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return bool [T]: another rank has the row. The outer ranks keep what is below and above the vocabulary."""
        is_below, is_above = token_ids < self.own_ids.start, token_ids >= self.own_ids.stop
        if self.group.rank == 0:
            return is_above
        return is_below if self.group.rank == self.group.size - 1 else is_below | is_above

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield _vocabulary_slot(self.vocab_size, self.own_ids, self.weight)


class OutputHead(nn.Module):
    """Hidden states to logits; with the embedding's weight when that is `tied_weight`, else with its own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tied_weight: nn.Parameter | None,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group = group
        shares = split_vocabulary(vocab_size, group)
        self.own_ids = shares[group.rank]
        self.widths = [len(share) for share in shares]
        self.is_tied = tied_weight is not None
        self.weight = (
            empty_parameter(len(self.own_ids), hidden_size, dtype=dtype, device=device)
            if tied_weight is None
            else tied_weight
        )
        # Kept, because fresh memory at every step costs more in page faults than the product.
        self.tile = torch.empty(HEAD_TILE, hidden_size, dtype=torch.float32, device=device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[N, hidden_size] -> fp32 [N, vocab_size] on rank 0, None on the others."""
        return self.group.gather_columns(head_logits(hidden, self.weight, self.tile), self.widths)

    def weight_slots(self) -> Iterator[WeightSlot]:
        if not self.is_tied:
            yield _vocabulary_slot(self.vocab_size, self.own_ids, self.weight)


def _vocabulary_slot(vocab_size: int, own_ids: range, weight: torch.Tensor) -> WeightSlot:
    return WeightSlot("weight", (vocab_size, weight.shape[1]), weight.copy_, own_ids)
