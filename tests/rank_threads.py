"""Ranks of a tensor-parallel group as threads of one process, for tests of what ranks compute, not of how they talk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from octavo.worker.distributed import TensorParallelGroup

Result = TypeVar("Result")
PATIENCE_S = 60.0


class ThreadGroup:
    """One rank's end: the ranks leave their tensors in a list that they share, and meet before and after reading it."""

    def __init__(self, rank: int, shared: list[torch.Tensor | None], meeting: threading.Barrier) -> None:
        self.rank, self.size = rank, len(shared)
        self.shared = shared
        self.meeting = meeting

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.shared[self.rank] = x.clone()
        self.meeting.wait(PATIENCE_S)
        tensors = [tensor for tensor in self.shared if tensor is not None]
        self.meeting.wait(PATIENCE_S)
        return tensors

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._exchange(x)
        total = first.clone()
        for other in others:
            total += other
        return x.copy_(total)

    def gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        tensors = self._exchange(x)
        assert [tensor.shape for tensor in tensors] == [(len(x), width) for width in widths]
        return torch.cat(tensors, dim=1) if self.rank == 0 else None

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._exchange(x)[0])

    def barrier(self, timeout_s: float) -> None:
        self.meeting.wait(timeout_s)


def thread_groups(size: int) -> list[ThreadGroup]:
    """Return the ends of a new group."""
    shared: list[torch.Tensor | None] = [None] * size
    meeting = threading.Barrier(size)
    return [ThreadGroup(rank, shared, meeting) for rank in range(size)]


def run_ranks(size: int, work: Callable[[TensorParallelGroup], Result]) -> list[Result]:
    """Run `work` on every rank at once; return the results by rank, or raise what the first to fail raised."""
    groups = thread_groups(size)
    return run_at_once(groups, [partial(work, group) for group in groups])


def run_at_once(groups: Sequence[TensorParallelGroup], calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run the calls of the ranks at once, a single one in this thread; return the results, as `run_ranks` does."""
    if len(calls) == 1:
        return [calls[0]()]

    def run(group: TensorParallelGroup, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except BaseException:
            if isinstance(group, ThreadGroup):
                group.meeting.abort()  # so that nobody waits for this rank
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(run, group, call) for group, call in zip(groups, calls, strict=True)]
    problems = [problem for future in futures if (problem := future.exception()) is not None]
    for problem in sorted(problems, key=lambda problem: isinstance(problem, threading.BrokenBarrierError)):
        raise problem
    return [future.result() for future in futures]
