"""Token embedding, and the head that turns hidden states into logits; each rank has its run of the vocabulary.

Logits are computed in fp32 whatever the dtype of the model: bfloat16 would round the largest ones to eighths, and
greedy sampling would choose among ties that the model never meant. A tied head shares the embedding's weight, so that
there is one copy of the largest tensor of a small model, whatever its format; both are cut alike. Rejected: a second
copy of the weight in fp32; logits on every rank, since rank 0 alone samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from octavo.worker.distributed import SINGLE_RANK, TensorParallelGroup
from octavo.worker.layers.linear_weight import HeldPacked, PlainWeight, WeightFactory
from octavo.worker.layers.shares import split_size
from octavo.worker.layers.weight_slot import WeightSlot

NAME = "weight"


def split_vocabulary(vocab_size: int, group: TensorParallelGroup) -> list[range]:
    """Return the token ids of every rank."""
    return split_size("vocab_size", vocab_size, group.size)


class Embedding(nn.Module):
    """Rows of a table, by token id. A rank looks up what it has, and the sum over the ranks fills in the rest."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        make: WeightFactory,
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.shape = (vocab_size, hidden_size)
        self.name = f"{make.prefix}{NAME}"
        self.group = group
        self.own_ids = split_vocabulary(vocab_size, group)[group.rank]
        self.weight = make.matrix([NAME], len(self.own_ids), range(hidden_size))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, hidden_size]; raises IndexError for an id that is not in the vocabulary.

        In a group, the rank raises that is nearest to the id.
        """
        if self.group.size == 1:
            return self.weight.look_up(token_ids)
        is_other = self._is_other(token_ids)
        rows = self.weight.look_up((token_ids - self.own_ids.start).masked_fill_(is_other, 0))
        return self.group.all_reduce(rows.masked_fill_(is_other[:, None], 0))

    def _is_other(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return bool [T]: another rank has the row. The outer ranks keep what is below and above the vocabulary."""
        is_below, is_above = token_ids < self.own_ids.start, token_ids >= self.own_ids.stop
        if self.group.rank == 0:
            return is_above
        return is_below if self.group.rank == self.group.size - 1 else is_below | is_above

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(self.name, self.shape, self.weight.load_rows, self.own_ids, self.weight.blocks)


class OutputHead(nn.Module):
    """Hidden states to logits; with the embedding's weight when that is `tied_weight`, else with its own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tied_weight: PlainWeight | HeldPacked | None,
        make: WeightFactory,
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        super().__init__()
        self.shape = (vocab_size, hidden_size)
        self.name = f"{make.prefix}{NAME}"
        self.group = group
        shares = split_vocabulary(vocab_size, group)
        self.own_ids = shares[group.rank]
        self.widths = [len(share) for share in shares]
        self.is_tied = tied_weight is not None
        self.weight = tied_weight or make.matrix([NAME], len(self.own_ids), range(hidden_size))
        self.weight.prepare_logits()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[N, hidden_size] -> fp32 [N, vocab_size] on rank 0, None on the others."""
        return self.group.gather_columns(self.weight.logits(hidden), self.widths)

    def weight_slots(self) -> Iterator[WeightSlot]:
        if not self.is_tied:
            yield WeightSlot(self.name, self.shape, self.weight.load_rows, self.own_ids, self.weight.blocks)
