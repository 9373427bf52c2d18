"""Collectives of CPU workers on one machine, through memory that all of them map.

A layer ends in two all-reduces of a few kilobytes, so what counts is how soon a rank sees what another one wrote:
a socket takes ten to a hundred times as long as a look at shared memory. Each rank has a counter, and two areas that it
alone writes, for the odd and the even collectives. A collective is: copy into the own area, count up, wait until the
others have counted up, read their areas.

Invariants: the counter goes up after the data is in place, and x86-64 makes stores visible in their order (Intel SDM
vol. 3A, 8.2), so who sees the count sees the data; elsewhere `make_group` takes gloo. Nobody starts collective n before
all have started n - 1, that is, finished n - 2, so that an area is never overwritten under a reader. A header says what
each rank is about to do; one that does something else is an error, never garbage.

A waiting rank first looks again and again, then lets other processes run between two looks, then sleeps in growing
steps, because its core may be needed by the very rank that it waits for. The sockets over which the memory was handed
out stay open: their end says that a rank is gone. Rejected: a file in a directory, which the kernel would write to a
disk all the time; semaphores, which cost two system calls where the others are there already, as they mostly are.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from socket import socket

import torch

from octavo.worker.distributed import RankDivergedError, RankLostError

AREA_BYTES = 1 << 20  # of one rank in one collective; what is larger goes in parts
CONTROL_WORDS = 32  # int64 words of a rank: its counter in the first cache line, its headers in the next two
HEADER_OFFSETS = (8, 16)  # of even and odd collectives
WAIT_TIMEOUT_S = 120.0  # for one that is stuck; a rank that ends is noticed at once
NUM_EAGER_LOOKS = 200  # some 10 µs
NUM_YIELDING_LOOKS = 5000  # some ms
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 5e-5, 1e-3
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Operation(IntEnum):
    """What a rank does in a collective."""

    BARRIER = 1
    ALL_REDUCE = 2
    GATHER = 3
    BROADCAST = 4


def memory_num_bytes(num_ranks: int, area_bytes: int = AREA_BYTES) -> int:
    """Return the size of the memory that a group shares."""
    return _control_num_bytes(num_ranks) + 2 * num_ranks * area_bytes


def _control_num_bytes(num_ranks: int) -> int:
    return -(-num_ranks * CONTROL_WORDS * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemoryGroup:
    """One rank's end; implements TensorParallelGroup."""

    def __init__(
        self,
        rank: int,
        size: int,
        memory_fd: int,
        peers: Mapping[int, socket],
        area_bytes: int = AREA_BYTES,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> None:
        """Map `memory_fd`, of `memory_num_bytes` zeros; it may be closed afterwards.

        Args:
            peers: connections on which nothing is sent any more, by the rank at their other end.
            area_bytes: a multiple of 64; of all ranks the same.
            timeout_s: longest wait for another rank within a collective.
        """
        self.rank, self.size = rank, size
        self.timeout_s = timeout_s
        self._others = [other for other in range(size) if other != rank]
        mapping = mmap.mmap(memory_fd, memory_num_bytes(size, area_bytes))
        self._words = memoryview(mapping).cast("q")
        data = torch.frombuffer(mapping, dtype=torch.uint8)[_control_num_bytes(size) :]
        areas = [[data[(2 * owner + odd) * area_bytes :][:area_bytes] for owner in range(size)] for odd in (0, 1)]
        self._area_bytes = area_bytes
        self._typed_areas = {dtype: [[area.view(dtype) for area in half] for half in areas] for dtype in DTYPES}
        self._count = 0  # collectives that this rank has started
        self._views: tuple[torch.dtype | None, int, list[list[torch.Tensor]]] = (None, 0, [])
        self._peers = {connection.fileno(): (other, connection) for other, connection in peers.items()}
        self._poll = select.poll()
        for file_descriptor in self._peers:
            self._poll.register(file_descriptor, select.POLLIN)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum in the order of the ranks, rounding to the dtype of `x` after each."""
        x = x.contiguous()
        for part in x.view(-1).split(self._area_bytes // x.dtype.itemsize):
            areas = self._begin(part.dtype, part.numel())
            areas[self.rank].copy_(part)
            header = self._publish(Operation.ALL_REDUCE, part.dtype, part.numel())
            for other in self._others:
                self._await(other, self._count, self.timeout_s)
                self._check_header(other, header)
            torch.add(areas[0], areas[1], out=part)
            for area in areas[2:]:
                part.add_(area)
        return x

    def gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        num_rows, widest, max_numbers = len(x), max(widths), self._area_bytes // x.dtype.itemsize
        part_width = min(widest, max_numbers)
        part_rows = max_numbers // part_width
        gathered = x.new_empty(num_rows, sum(widths)) if self.rank == 0 else None
        outputs = gathered.split(list(widths), dim=1) if gathered is not None else ()
        for first_row in range(0, num_rows, part_rows):
            for first_column in range(0, widest, part_width):
                part = (slice(first_row, first_row + part_rows), slice(first_column, first_column + part_width))
                self._gather_part(x[part], [output[part] for output in outputs])
        return gathered

    def _gather_part(self, x: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """Bring `x` [rows, columns] of each rank into its output on rank 0; the numbers of columns may differ."""
        areas = self._begin(x.dtype, self._area_bytes // x.dtype.itemsize)
        if self.rank != 0:
            areas[self.rank][: x.numel()].view(x.shape).copy_(x)
        header = self._publish(Operation.GATHER, x.dtype, len(x))
        if self.rank != 0:
            return
        outputs[0].copy_(x)
        for other in self._others:
            self._await(other, self._count, self.timeout_s)
            self._check_header(other, header)
            output = outputs[other]
            output.copy_(areas[other][: output.numel()].view(output.shape))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        for part in x.view(-1).split(self._area_bytes // x.dtype.itemsize):
            areas = self._begin(part.dtype, part.numel())
            if self.rank == 0:
                areas[0].copy_(part)
            header = self._publish(Operation.BROADCAST, part.dtype, part.numel())
            if self.rank != 0:
                self._await(0, self._count, self.timeout_s)
                self._check_header(0, header)
                part.copy_(areas[0])
        return x

    def barrier(self, timeout_s: float) -> None:
        self._begin(torch.int64, 0)
        header = self._publish(Operation.BARRIER, torch.int64, 0)
        for other in self._others:
            self._await(other, self._count, timeout_s)
            self._check_header(other, header)

    def _begin(self, dtype: torch.dtype, num_numbers: int) -> list[torch.Tensor]:
        """Wait until the next collective's areas are free; return the first `num_numbers` of each, by rank.

        The views are kept, because a step's collectives are mostly of one size.
        """
        for other in self._others:
            self._await(other, self._count, self.timeout_s)
        known_dtype, known_number, views = self._views
        if (dtype, num_numbers) != (known_dtype, known_number):
            views = [[area[:num_numbers] for area in areas] for areas in self._typed_areas[dtype]]
            self._views = (dtype, num_numbers, views)
        return views[(self._count + 1) % 2]

    def _publish(self, operation: Operation, dtype: torch.dtype, num_numbers: int) -> int:
        """Let the others see this rank's area; return the header, which is also that of a rank that does the same."""
        header = num_numbers << 16 | DTYPE_CODES[dtype] << 8 | operation
        self._count += 1
        first_word = self.rank * CONTROL_WORDS
        self._words[first_word + HEADER_OFFSETS[self._count % 2]] = header
        self._words[first_word] = self._count
        return header

    def _check_header(self, other: int, own_header: int) -> None:
        header = self._words[other * CONTROL_WORDS + HEADER_OFFSETS[self._count % 2]]
        if header != own_header:
            raise RankDivergedError(
                f"collective {self._count}: rank {self.rank} does {_describe(own_header)}, "
                f"rank {other} does {_describe(header)}"
            )

    def _await(self, other: int, count: int, timeout_s: float) -> None:
        """Wait until rank `other` has started `count` collectives."""
        words, index = self._words, other * CONTROL_WORDS
        for _ in range(NUM_EAGER_LOOKS):
            if words[index] >= count:
                return
        deadline_s = time.monotonic() + timeout_s
        sleep_s = SHORTEST_SLEEP_S
        num_looks = 0
        while words[index] < count:
            num_looks += 1
            if num_looks < NUM_YIELDING_LOOKS:
                os.sched_yield()
                continue
            self._check_peers()
            if time.monotonic() > deadline_s:
                raise RankLostError(f"rank {self.rank} waited {timeout_s:g} s for rank {other}")
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)

    def _check_peers(self) -> None:
        """A peer may have counted up before it left: only who still waits for it has lost it."""
        for file_descriptor, _ in self._poll.poll(0):
            raise RankLostError(f"rank {self._peers[file_descriptor][0]} is gone")


def _describe(header: int) -> str:
    dtype = str(DTYPES[header >> 8 & 0xFF]).removeprefix("torch.")
    return f"{Operation(header & 0xFF).name} of {header >> 16} {dtype}"
