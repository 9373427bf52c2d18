"""The ranks that share one model: what they tell each other in every step.

Every rank executes the same steps in the same order, so collectives meet without a word. Invariant: every rank holds
the same bits of a sum. It is taken in the order of the ranks; on GPUs, unless they have to be deterministic, in NCCL's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from octavo.protocol.config import EngineConfig


class RankLostError(RuntimeError):
    """Another rank is gone, or stuck for longer than anybody waits."""


class RankDivergedError(RuntimeError):
    """The ranks do not do the same: their states have parted, and all have to start anew."""


class TensorParallelGroup(Protocol):
    """The collectives of one group of workers; each blocks, or is ordered on the device's stream.

    All ranks call the same methods in the same order, with tensors of the same dtype. Raises RankLostError or
    RankDivergedError where it can tell; other errors of the transport mean the same.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's `x`, contiguous; `x` may be overwritten with it."""
        ...

    def gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Return every rank's `x` [N, widths[rank]] side by side on rank 0, None on the others."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `x`; on the others `x` has its shape and dtype, and is overwritten."""
        ...

    def barrier(self, timeout_s: float) -> None:
        """Wait on the host until every rank is here; raises RankLostError after `timeout_s`."""
        ...


class SingleRank:
    """A group of one, which has nobody to talk to."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def barrier(self, timeout_s: float) -> None:
        return


SINGLE_RANK: TensorParallelGroup = SingleRank()


def smallest_of_ranks(group: TensorParallelGroup, number: int, device: torch.device) -> int:
    """Return the smallest `number`, which must not be negative, of all ranks; every rank has to call it."""
    if group.size == 1:
        return number
    numbers = torch.zeros(group.size, dtype=torch.int64, device=device)
    numbers[group.rank] = number
    return int(group.all_reduce(numbers).min())


def make_group(config: EngineConfig, rank: int, device: torch.device) -> TensorParallelGroup:
    """Return the group of all workers once every one of them has come; `rank` counts over all nodes.

    CPUs of one machine talk through shared memory where they see each other's writes in order (x86-64), else through
    gloo; GPUs through NCCL. Raises StartupError: NODE_LOST naming the nodes that did not come, USAGE when node 0's
    address cannot be listened on, FAILURE when a rank of this machine did not come.
    """
    if config.parallel.tensor_parallel_size == 1:
        return SINGLE_RANK
    from octavo.worker.distributed_setup import connect_group  # it imports this module

    return connect_group(config, rank, device)
