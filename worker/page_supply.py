"""Memory for KV blocks that nobody has used yet, taken from the system while the worker has nothing else to do.

A page costs its price when it is first written: the system clears it, and where it is the guest of another one, that
one may have to find the memory first. Paid by prompts, this was an eighth of their time. Blocks are handed out in
ascending order as long as there are free ones, so what will be needed next lies behind the highest block that a step
has named; a share of the pool is kept ready there, one small piece at a time, so that a step which arrives meanwhile
waits for a few milliseconds at most. Invariant: what blocks hold does not change.

Rejected: taking the whole pool at the start, which is half of the machine's memory for a server that may never need it;
a thread, which would take a core from those that compute just when there is something to compute.
"""

from __future__ import annotations

from itertools import chain

import torch

from octavo.protocol.worker_messages import SchedulerOutput
from octavo.worker.host import take_pages

SHARE_AHEAD = 1 / 16
PIECE_BYTES = 2 * 2**20


class PageSupply:
    """Keeps pages ready for the blocks of one KV cache in the memory of this machine."""

    def __init__(self, kv_cache: torch.Tensor, share_ahead: float = SHARE_AHEAD) -> None:
        """Of `kv_cache` (see `allocate_kv_cache`), keep `share_ahead` of the blocks ready."""
        num_layers, num_parts, self.num_blocks = kv_cache.shape[:3]
        segment_bytes = kv_cache.stride(1) * kv_cache.element_size()
        self.block_bytes = kv_cache.stride(2) * kv_cache.element_size()
        self.segments = [kv_cache.data_ptr() + i * segment_bytes for i in range(num_layers * num_parts)]
        self.blocks_per_piece = max(1, PIECE_BYTES // self.block_bytes)
        self.num_ahead = int(share_ahead * self.num_blocks)
        self.num_wanted = self.num_ahead
        self.num_ready = self.num_segments_further = 0

    def note(self, step: SchedulerOutput) -> None:
        """See which blocks a step uses."""
        used = chain.from_iterable(request.block_ids for request in step.new_requests)
        grown = chain.from_iterable(request.new_block_ids for request in step.cached_requests)
        highest = max(chain(used, grown), default=-1)
        self.num_wanted = max(self.num_wanted, min(self.num_blocks, highest + 1 + self.num_ahead))

    @property
    def lacks_some(self) -> bool:
        return self.num_ready < self.num_wanted

    def add_some(self) -> None:
        """Take the memory of one piece, if one is lacking."""
        if not self.lacks_some:
            return
        num_blocks = min(self.blocks_per_piece, self.num_blocks - self.num_ready)
        start = self.segments[self.num_segments_further] + self.num_ready * self.block_bytes
        if not take_pages(start, num_blocks * self.block_bytes):
            self.num_ready = self.num_blocks  # a system without this: pages come when they are written
            return
        self.num_segments_further += 1
        if self.num_segments_further == len(self.segments):
            self.num_ready, self.num_segments_further = self.num_ready + num_blocks, 0
