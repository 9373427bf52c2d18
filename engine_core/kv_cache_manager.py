"""The block table of every request, in both tiers: look up, share, allocate, copy, swap, free.

A new table begins with a `Prefix`: blocks that are there already and how they get into the table: shared by reference
(the prefix cache; the full blocks of a fork), copied in from the host (swapped or offloaded blocks), or copied on the
device (the partial last block of a fork, which is about to be written: copy on write). The rest are fresh blocks.

Copies are one ordered list that the next step takes along, done one after the other before it computes; so whatever a
later decision gives away or overwrites, an earlier copy has read it. Invariant: tables and pools agree: a block has
as many references as there are places in tables that name it. Rejected: tables inside Request, because then whoever
drops a request drops its blocks; separate lists of swaps in and out, whose order against each other has to be argued.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from octavo.engine_core.block_hash import extend_hashes
from octavo.engine_core.block_pool import BlockPool
from octavo.engine_core.invariants import require
from octavo.engine_core.request import Request
from octavo.protocol.worker_messages import BlockCopy, CopyKind


class SharedBlock(NamedTuple):
    """A block of a prefix, and how it gets into a table: by reference (None) or by a copy into a fresh block."""

    block_id: int
    copy: CopyKind | None = None


class Prefix(NamedTuple):
    """What a new table can begin with: its first blocks, which hold the KV of the first `num_tokens` tokens."""

    blocks: list[SharedBlock]
    num_tokens: int


NO_PREFIX = Prefix([], 0)


class KVCacheManager:
    """Token slots of both tiers, given out in blocks of `block_size`.

    Attributes:
        block_tables, host_tables: request_id -> block ids in token order.
        num_swapped_out_blocks, num_swapped_in_blocks: copies between the tiers since the start.
    """

    def __init__(
        self,
        num_device_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        enable_prefix_caching: bool = True,
        enable_offload: bool = False,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.device_pool = BlockPool(num_device_blocks, self._offload if enable_offload else None)
        self.host_pool = BlockPool(num_host_blocks)
        self.block_tables: dict[str, list[int]] = {}
        self.host_tables: dict[str, list[int]] = {}
        self.num_swapped_out_blocks = 0
        self.num_swapped_in_blocks = 0
        self._copies: list[BlockCopy] = []

    @property
    def num_total_blocks(self) -> int:
        return self.device_pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.device_pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.device_pool.num_held_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def take_copies(self) -> list[BlockCopy]:
        """The copies that were decided since the last call, in order."""
        copies, self._copies = self._copies, []
        return copies

    # What is there already

    def update_hashes(self, request: Request) -> None:
        """Name the request's full blocks of known tokens."""
        if self.enable_prefix_caching and not request.has_failed:
            num_known_tokens = request.num_prompt_tokens + request.num_output_tokens
            start = len(request.block_hashes) * self.block_size
            if num_known_tokens - start >= self.block_size:
                token_ids = request.token_ids(start, num_known_tokens)
                extend_hashes(request.block_hashes, request.root_hash, token_ids, self.block_size)

    def find_prefix(self, request: Request) -> Prefix:
        """The longest beginning of a waiting request that is in a cache; its last token is never part of it.

        That token has to be computed, for the logits of the next one.
        """
        blocks: list[SharedBlock] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self._find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return Prefix(blocks, len(blocks) * self.block_size)

    def find_swapped(self, request: Request) -> Prefix:
        """All blocks of a swapped request; those that are still on the device are not copied again."""
        blocks = []
        for index, host_block_id in enumerate(self.host_tables[request.request_id]):
            is_named = index < min(request.num_registered_blocks, request.num_computed_tokens // self.block_size)
            block_id = self.device_pool.find(request.block_hashes[index]) if is_named else None
            blocks.append(SharedBlock(host_block_id, CopyKind.SWAP_IN) if block_id is None else SharedBlock(block_id))
        return Prefix(blocks, request.num_computed_tokens)

    def find_fork(self, request_id: str, num_tokens: int) -> Prefix:
        """The blocks of a running request's first `num_tokens` tokens: full ones shared, a partial last one copied."""
        num_full_blocks, num_rest_tokens = divmod(num_tokens, self.block_size)
        table = self.block_tables[request_id]
        blocks = [SharedBlock(block_id) for block_id in table[:num_full_blocks]]
        if num_rest_tokens:
            blocks.append(SharedBlock(table[num_full_blocks], CopyKind.DEVICE))
        return Prefix(blocks, num_tokens)

    def _find(self, block_hash: bytes) -> SharedBlock | None:
        block_id = self.device_pool.find(block_hash)
        if block_id is not None:
            return SharedBlock(block_id)
        block_id = self.host_pool.find(block_hash)
        return None if block_id is None else SharedBlock(block_id, CopyKind.SWAP_IN)

    def num_blocks_to_take(self, prefix: Prefix, num_tokens: int) -> int:
        """By how many `num_free_blocks` shrinks when a table of `num_tokens` tokens begins with `prefix`."""
        num_held = sum(
            block.copy is None and self.device_pool.num_references[block.block_id] > 0 for block in prefix.blocks
        )
        return self.num_blocks_for(num_tokens) - num_held

    # Tables

    def add_table(self, request: Request, prefix: Prefix, num_tokens: int) -> list[int] | None:
        """Start a table that covers `num_tokens` tokens and begins with `prefix`.

        Returns a copy of it; None, and nothing changed, when the pool has too few free blocks.
        """
        require(request.request_id not in self.block_tables, f"{request.request_id} has a table already")
        if self.num_blocks_to_take(prefix, num_tokens) > self.num_free_blocks:
            return None
        self._hold(prefix)
        num_shared = sum(block.copy is None for block in prefix.blocks)
        fresh = iter(self.device_pool.allocate(self.num_blocks_for(num_tokens) - num_shared) or ())
        table = [self._take(block, fresh) for block in prefix.blocks] + list(fresh)
        self._give_back_host_blocks(prefix)
        self.block_tables[request.request_id] = table
        request.num_registered_blocks = 0
        self.register_blocks(request, prefix.num_tokens)
        return table.copy()

    def _hold(self, prefix: Prefix) -> None:
        """Make sure that taking fresh blocks evicts none of the prefix, in either tier."""
        for block in prefix.blocks:
            if block.copy is None:
                self.device_pool.share(block.block_id)
            elif block.copy is CopyKind.SWAP_IN:
                self.host_pool.share(block.block_id)

    def _take(self, block: SharedBlock, fresh: Iterator[int]) -> int:
        if block.copy is None:
            return block.block_id
        destination = next(fresh)
        self._copies.append((block.copy, block.block_id, destination))
        self.num_swapped_in_blocks += block.copy is CopyKind.SWAP_IN
        return destination

    def _give_back_host_blocks(self, prefix: Prefix) -> None:
        self.host_pool.free([block.block_id for block in prefix.blocks if block.copy is CopyKind.SWAP_IN])

    def grow_table(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Make the request's table cover its first `num_tokens` tokens.

        Returns the ids that were appended, or None, with nothing changed, when the pool has too few free blocks.
        """
        table = self.block_tables[request_id]
        num_new_blocks = -(-num_tokens // self.block_size) - len(table)
        if num_new_blocks <= 0:
            return []
        block_ids = self.device_pool.allocate(num_new_blocks)
        if block_ids is not None:
            table += block_ids
        return block_ids

    def register_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let others find the full blocks of the request's first `num_computed_tokens` tokens, as far as named."""
        first = request.num_registered_blocks
        last = 0 if request.has_failed else min(num_computed_tokens // self.block_size, len(request.block_hashes))
        if last > first:
            table = self.block_tables[request.request_id]
            for index in range(first, last):
                self.device_pool.register(table[index], request.block_hashes[index])
            request.num_registered_blocks = last

    def free(self, request_id: str) -> None:
        """Take the request's device blocks back; what has a name stays cached."""
        self.device_pool.free(self.block_tables.pop(request_id))

    def forget(self, block_hashes: Iterable[bytes]) -> None:
        """What has these names may be wrong: nobody may find it, in either tier."""
        for block_hash in block_hashes:
            for pool in (self.device_pool, self.host_pool):
                block_id = pool.find(block_hash)
                if block_id is not None:
                    pool.forget(block_id)

    # The host tier

    def swap_out(self, request: Request) -> bool:
        """Move the request's KV to the host; False, and nothing changed, when the host tier has no room."""
        num_blocks = self.num_blocks_for(request.num_computed_tokens)
        table = self.block_tables[request.request_id][:num_blocks]
        hashes = request.block_hashes[: min(num_blocks, request.num_registered_blocks)]
        there = [self.host_pool.find(block_hash) for block_hash in hashes]
        there += [None] * (num_blocks - len(there))
        num_idle = sum(block_id is not None and not self.host_pool.num_references[block_id] for block_id in there)
        if num_blocks == 0 or there.count(None) > self.host_pool.num_free_blocks - num_idle:
            return False
        for block_id in there:
            if block_id is not None:
                self.host_pool.share(block_id)
        fresh = iter(self.host_pool.allocate(there.count(None)) or ())
        host_table = [
            self._copy_out(source, next(fresh)) if host_block_id is None else host_block_id
            for source, host_block_id in zip(table, there, strict=True)
        ]
        for host_block_id, block_hash in zip(host_table, hashes, strict=False):
            self.host_pool.register(host_block_id, block_hash)
        self.host_tables[request.request_id] = host_table
        self.free(request.request_id)
        return True

    def free_host(self, request_id: str) -> None:
        """Take the request's host blocks back."""
        self.host_pool.free(self.host_tables.pop(request_id))

    def _copy_out(self, source: int, destination: int) -> int:
        self._copies.append((CopyKind.SWAP_OUT, source, destination))
        self.num_swapped_out_blocks += 1
        return destination

    def _offload(self, block_id: int, block_hash: bytes) -> None:
        """Keep the content of a device block that is evicted, unless it is on the host already or that is full."""
        if self.host_pool.find(block_hash) is None:
            host_block_ids = self.host_pool.allocate(1)
            if host_block_ids is not None:
                self._copy_out(block_id, host_block_ids[0])
                self.host_pool.register(host_block_ids[0], block_hash)
                self.host_pool.free(host_block_ids)

    def check(self) -> None:
        """Raise InvariantError unless pools and tables agree."""
        _check_tier(self.device_pool, self.block_tables.values(), "device")
        _check_tier(self.host_pool, self.host_tables.values(), "host")


def _check_tier(pool: BlockPool, tables: Iterable[Sequence[int]], tier: str) -> None:
    pool.check()
    named = Counter(block_id for table in tables for block_id in table)
    for block_id, num_references in enumerate(pool.num_references):
        require(named[block_id] == num_references, f"tables name {tier} block {block_id} {named[block_id]} times")
