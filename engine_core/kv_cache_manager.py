"""The block table of every request that holds blocks.

Invariant: the tables and the pool agree: a block has as many references as there are places in tables that name it.
`allocate` is the only way into a table and `free` the only way out, so a block cannot leak. Rejected: tables inside
Request, because then whoever drops a request drops its blocks.
"""

from __future__ import annotations

from collections import Counter

from octavo.engine_core.block_pool import BlockPool
from octavo.engine_core.invariants import require


class KVCacheManager:
    """Token slots of the device tier, given out in blocks of `block_size`."""

    def __init__(self, num_device_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.device_pool = BlockPool(num_device_blocks)
        self.block_tables: dict[str, list[int]] = {}  # request_id -> block ids in token order

    @property
    def num_total_blocks(self) -> int:
        return self.device_pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.device_pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.device_pool.num_blocks - self.device_pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def add_table(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Start a table that covers `num_tokens` tokens and return it; None when the pool has too few free blocks."""
        require(request_id not in self.block_tables, f"{request_id} has a table already")
        block_ids = self.device_pool.allocate(self.num_blocks_for(num_tokens))
        if block_ids is not None:
            self.block_tables[request_id] = block_ids.copy()
        return block_ids

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

    def free(self, request_id: str) -> None:
        """Take the request's whole table back."""
        self.device_pool.free(self.block_tables.pop(request_id))

    def check(self) -> None:
        """Raise InvariantError unless pool and tables agree."""
        self.device_pool.check()
        named = Counter(block_id for table in self.block_tables.values() for block_id in table)
        for block_id, num_references in enumerate(self.device_pool.num_references):
            require(named[block_id] == num_references, f"tables name block {block_id} {named[block_id]} times")
