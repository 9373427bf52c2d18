"""Collectives through the process groups of torch.distributed: gloo between CPUs, NCCL between GPUs.

The backends are used as objects of their own, without torch's default group, which would be global state and read the
environment. A store, shared by all ranks, is where they find each other and wait on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch.distributed import Store, Work

from octavo.worker.distributed import RankLostError

ROOT = 0


class Backend(Protocol):
    """What is used of torch.distributed's backends; torch has no public name for what they share."""

    def allgather(self, output_tensors: list[torch.Tensor], input_tensor: torch.Tensor) -> Work: ...

    def allreduce(self, tensor: torch.Tensor) -> Work: ...

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work: ...

    def gather(self, output_tensors: list[torch.Tensor], input_tensor: torch.Tensor, root: int) -> Work: ...


def await_ranks(store: Store, event: str, rank: int, size: int, timeout_s: float) -> list[int]:
    """Say that this rank has come to `event`, which no other wait may be called, and wait for the others.

    Returns the ranks that did not come within `timeout_s`; raises RankLostError when the store is gone.
    """
    keys = [f"{event}/{number}" for number in range(size)]
    try:
        store.set(keys[rank], "here")
        try:
            store.wait(keys, timedelta(seconds=timeout_s))
        except RuntimeError:
            return [number for number, key in enumerate(keys) if not store.check([key])]
    except RuntimeError as problem:
        raise RankLostError(f"rank {rank} lost the store of the ranks: {problem}") from problem
    return []


class BackendGroup:
    """One rank's end; implements what gloo and NCCL have in common of TensorParallelGroup."""

    def __init__(self, backend: Backend, store: Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.backend = backend
        self.store = store
        self.num_barriers = 0

    def gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Both libraries gather equal parts only: narrow ones travel with columns that rank 0 drops."""
        widest = max(widths)
        part = torch.nn.functional.pad(x, (0, widest - x.shape[1])) if x.shape[1] < widest else x.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == ROOT else []
        self.backend.gather(parts, part, ROOT).wait()
        if self.rank != ROOT:
            return None
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self.backend.broadcast(x, ROOT).wait()
        return x

    def barrier(self, timeout_s: float) -> None:
        self.num_barriers += 1
        missing = await_ranks(self.store, f"barrier-{self.num_barriers}", self.rank, self.size, timeout_s)
        if missing:
            raise RankLostError(f"rank {self.rank} waited {timeout_s:g} s for ranks {missing}")


class OrderedGroup(BackendGroup):
    """Sums in the order of the ranks: gloo's, whose own sum has no such order, and NCCL's where sums must be steady."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Bring every rank's part here and add them up, rounding to the dtype of `x` after each."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.backend.allgather(parts, x).wait()
        torch.add(parts[0], parts[1], out=x)
        for part in parts[2:]:
            x.add_(part)
        return x


class NcclGroup(BackendGroup):
    """CUDA tensors; calls return when the work is queued, and the current stream waits for it."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum in an order that NCCL chooses by size and machine.

        Every rank gets the same bits, and equal calls give equal sums; but the bits of a row may depend on how many
        rows are summed with it. `OrderedGroup` is for those who mind.
        """
        x = x.contiguous()
        self.backend.allreduce(x).wait()
        return x
