"""Copies of whole KV blocks between the tiers and within the device: swaps, offload, and copy on write.

A step's copies have the effect of being done one after the other. Done so, each would cost the start of an operation,
on a GPU several times what the copy itself costs; so they are gathered into as few batches as their order allows. A
batch holds copies of one kind and reads all of its sources before it writes. Invariant: of two copies that name one
block, and not only to read it, the later one is in a later batch, or in the same batch when it writes what the earlier
one reads. Batches are small enough that what is under way fits in the memory that steps leave free.

On a device with streams, swaps run on the side stream, beside the steps that do not need them. A swap comes after the
steps before it, which may have written what it reads or may still read what it overwrites; what is swapped in is there
before the step computes; and a step that writes a block waits until it has been swapped out, which
`let_writes_follow_copies` sees to. Copies within the device are part of the steps' own stream.

With checksums (a debugging aid), a block is summed as it leaves the device and again when it is back, so that what went
wrong on the way or on the host shows. It does not stop the step: the engine core gives up what depends on the block.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np
import torch

from octavo.kernels.ops.attention import copy_blocks
from octavo.kernels.ops.kv_formats import FP8_DTYPE
from octavo.protocol.worker_messages import BlockCopy, CopyKind
from octavo.worker.cpu_device import CPU_DEVICE
from octavo.worker.device import Device, Event

BATCH_NUM_BYTES = 8 * 2**20  # more at a time was slower on CPUs: what is under way is then no longer in their caches
NUM_TIMED_BLOCKS = 8


class Tier(IntEnum):
    """Where blocks are."""

    DEVICE = 0
    HOST = 1


SOURCE = {CopyKind.SWAP_OUT: Tier.DEVICE, CopyKind.SWAP_IN: Tier.HOST, CopyKind.DEVICE: Tier.DEVICE}
DESTINATION = {CopyKind.SWAP_OUT: Tier.HOST, CopyKind.SWAP_IN: Tier.DEVICE, CopyKind.DEVICE: Tier.DEVICE}


def batch_copies(copies: Sequence[BlockCopy]) -> list[tuple[CopyKind, list[tuple[int, int]]]]:
    """Return batches (kind, [(source, destination)]) with the effect of doing `copies` one after the other.

    Batches are numbered, and number n holds copies of kind n modulo the number of kinds. Each copy goes to the first
    batch that its kind and the copies before it allow. No destination is twice in a batch, and none is the source of a
    later copy of it.
    """
    last_write: dict[tuple[Tier, int], int] = {}
    last_read: dict[tuple[Tier, int], int] = {}
    batches: dict[int, list[tuple[int, int]]] = {}
    for kind, source_id, destination_id in copies:
        source, destination = (SOURCE[kind], source_id), (DESTINATION[kind], destination_id)
        first = max(
            last_write.get(source, -1) + 1,
            last_write.get(destination, -1) + 1,
            last_read.get(destination, 0),
        )
        number = first + (kind - first) % len(CopyKind)
        batches.setdefault(number, []).append((source_id, destination_id))
        last_write[destination] = number
        last_read[source] = max(last_read.get(source, 0), number)
    return [(CopyKind(number % len(CopyKind)), batches[number]) for number in sorted(batches)]


def block_checksum(cache: torch.Tensor, block_id: int) -> int:
    """Return the CRC-32 of a block's bytes over all layers of [num_layers, 2, num_blocks, ...]."""
    block = cache[:, :, block_id].contiguous().cpu()
    return zlib.crc32(block.view(torch.uint8).numpy())


def _as_copied(cache: torch.Tensor) -> torch.Tensor:
    """Return a view of a cache that torch can copy blocks of; of fp8 it cannot."""
    return cache.view(torch.uint8) if cache.dtype is FP8_DTYPE else cache


class BlockCopier:
    """Copies blocks of a device tier and a host tier, and checks them when asked to.

    Both tiers are [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; the host's may have no blocks.
    """

    def __init__(
        self,
        device_cache: torch.Tensor,
        host_cache: torch.Tensor,
        check_swapped_blocks: bool,
        device: Device = CPU_DEVICE,
    ) -> None:
        self.caches = {Tier.DEVICE: device_cache, Tier.HOST: host_cache}
        self._copied = {tier: _as_copied(cache) for tier, cache in self.caches.items()}
        self.check_swapped_blocks = check_swapped_blocks
        self.device = device
        self.checksums: dict[int, int] = {}  # by host block
        self.swapping_out: dict[int, Event] = {}  # device block -> when it has been read
        block_bytes = device_cache[:, :, :1].nbytes
        self.max_batch_blocks = max(1, BATCH_NUM_BYTES // block_bytes)

    def num_blocks(self, tier: Tier) -> int:
        return self.caches[tier].shape[2]

    def apply(self, copies: Sequence[BlockCopy]) -> list[int]:
        """Do `copies`; return the device blocks that came from the host with a wrong checksum.

        Raises ValueError for a block that is not there.
        """
        if not copies:
            return []
        for copy in copies:
            self._check_exists(copy)
        corrupt_block_ids: list[int] = []
        streams = _CopyStreams(self.device)
        for kind, pairs in batch_copies(copies):
            with streams.of(kind):
                self._copy(kind, pairs)
            if self.check_swapped_blocks:
                self.device.synchronize()
                corrupt_block_ids += self._check_content(kind, pairs)
        if any(kind is CopyKind.SWAP_IN for kind, _, _ in copies):
            streams.join()
        elif streams.last_swap is not None:
            sources = [source for kind, source, _ in copies if kind is CopyKind.SWAP_OUT]
            self.swapping_out |= dict.fromkeys(sources, streams.last_swap)
        return corrupt_block_ids

    def let_writes_follow_copies(self, block_ids: np.ndarray) -> None:
        """Before the device blocks `block_ids` are written: have that wait until they are swapped out."""
        if not self.swapping_out:
            return
        for event in {id(event): event for event in map(self.swapping_out.get, block_ids.tolist()) if event}.values():
            event.wait()
        self.swapping_out = {block: event for block, event in self.swapping_out.items() if not event.query()}

    def _copy(self, kind: CopyKind, pairs: list[tuple[int, int]]) -> None:
        if kind is CopyKind.DEVICE:
            self.let_writes_follow_copies(np.array([destination for _, destination in pairs]))
        for first in range(0, len(pairs), self.max_batch_blocks):
            batch = pairs[first : first + self.max_batch_blocks]
            copy_blocks(self._copied[SOURCE[kind]], self._copied[DESTINATION[kind]], batch)

    def _check_exists(self, copy: BlockCopy) -> None:
        kind, source, destination = copy
        num_sources, num_destinations = self.num_blocks(SOURCE[kind]), self.num_blocks(DESTINATION[kind])
        if not (0 <= source < num_sources and 0 <= destination < num_destinations):
            raise ValueError(
                f"copy {kind.name} of block {source} to {destination}: there are {self.num_blocks(Tier.DEVICE)} device "
                f"blocks and {self.num_blocks(Tier.HOST)} host blocks"
            )

    def _check_content(self, kind: CopyKind, pairs: list[tuple[int, int]]) -> list[int]:
        """Sum what was swapped out; return the destinations of what came back different, or was never swapped out."""
        device_cache = self.caches[Tier.DEVICE]
        if kind is CopyKind.SWAP_OUT:
            self.checksums.update((host_id, block_checksum(device_cache, device_id)) for device_id, host_id in pairs)
        if kind is not CopyKind.SWAP_IN:
            return []
        return [
            device_id
            for host_id, device_id in pairs
            if self.checksums.get(host_id) != block_checksum(device_cache, device_id)
        ]


class _CopyStreams:
    """Which stream each batch of one step's copies runs on, each after the batch before it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.last_swap: Event | None = None
        self._is_on_side = False

    @contextlib.contextmanager
    def of(self, kind: CopyKind) -> Iterator[None]:
        """Give what is done inside to the stream of `kind`, after everything before."""
        if kind is CopyKind.DEVICE:
            self.join()
            yield
            return
        steps_before = None if self._is_on_side else self.device.record()
        with self.device.on_side_stream():
            if steps_before is not None:
                steps_before.wait()
            yield
            self.last_swap = self.device.record()
        self._is_on_side = True

    def join(self) -> None:
        """Let the steps' stream go on after the swaps so far."""
        if self._is_on_side and self.last_swap is not None:
            self.last_swap.wait()
        self._is_on_side = False


def measure_copied_blocks_per_s(copier: BlockCopier) -> float:
    """Return the mean speed of both directions, 0 without host blocks; overwrites the first few blocks."""
    num_blocks = min(NUM_TIMED_BLOCKS, copier.num_blocks(Tier.DEVICE), copier.num_blocks(Tier.HOST))
    copies = [(kind, i, i) for kind in (CopyKind.SWAP_OUT, CopyKind.SWAP_IN) for i in range(num_blocks)]
    copier.apply(copies)  # the first time takes memory from the operating system
    copier.device.synchronize()
    started_s = time.perf_counter()
    copier.apply(copies)
    copier.device.synchronize()
    return len(copies) / (time.perf_counter() - started_s)
