"""Blocks of one memory tier: which are free, which are cached, and how many references each of the others has.

A block is in one of three states. *Held*: it has references. *Cached*: nobody refers to it, but it has a hash, so
that its content can be found and held again. *Free*: neither. Invariant: free + cached + held == total, and a hash
names one block. Free blocks are taken first, the last freed before all others, so memory that is never needed is never
touched; then the cached block that was given up longest ago is evicted. A table gives up its deepest blocks first: a
beginning is worth more than what follows it, which cannot be found without it. Rejected: a first-in first-out free
list, which walks through the whole tier, and a set, whose order is nobody's decision.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from octavo.engine_core.invariants import require


class BlockPool:
    """The blocks 0 to num_blocks - 1.

    Attributes:
        cached: block ids that nobody refers to but that have a hash, the next to be evicted first.
        block_hashes: by block id; None for a block whose content has no name.
        on_evict: called with block id and hash just before a cached block loses its content.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.free_block_ids = list(range(num_blocks - 1, -1, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.num_references = [0] * num_blocks
        self.block_hashes: list[bytes | None] = [None] * num_blocks
        self.hash_to_block_id: dict[bytes, int] = {}
        self.on_evict = on_evict

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken: the free and the cached ones."""
        return len(self.free_block_ids) + len(self.cached)

    @property
    def num_held_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks with one reference each; None, and nothing taken, when there are fewer."""
        if num_blocks > len(self.free_block_ids) + len(self.cached):
            return None
        block_ids = [self.free_block_ids.pop() if self.free_block_ids else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self.num_references[block_id] = 1
        return block_ids

    def _evict(self) -> int:
        block_id, _ = self.cached.popitem(last=False)
        block_hash = self.block_hashes[block_id]
        require(block_hash is not None, f"cached block {block_id} has no hash")
        if block_hash is not None and self.on_evict is not None:
            self.on_evict(block_id, block_hash)
        self._drop_hash(block_id)
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference to a held or cached block."""
        if self.num_references[block_id] == 0:
            del self.cached[block_id]
        self.num_references[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block, from the last to the first."""
        for block_id in reversed(block_ids):
            num_references = self.num_references[block_id] - 1
            require(num_references >= 0, f"block {block_id} freed twice")
            self.num_references[block_id] = num_references
            if num_references == 0:
                if self.block_hashes[block_id] is None:
                    self.free_block_ids.append(block_id)
                else:
                    self.cached[block_id] = None

    # Content

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content."""
        return self.hash_to_block_id.get(block_hash)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Say what a held block contains. When another block has the same content, that one stays the one to find."""
        if block_hash not in self.hash_to_block_id and self.block_hashes[block_id] is None:
            self.hash_to_block_id[block_hash] = block_id
            self.block_hashes[block_id] = block_hash

    def forget(self, block_id: int) -> None:
        """A block's content must not be found any more."""
        self._drop_hash(block_id)
        if block_id in self.cached:
            del self.cached[block_id]
            self.free_block_ids.append(block_id)

    def _drop_hash(self, block_id: int) -> None:
        block_hash = self.block_hashes[block_id]
        if block_hash is not None:
            del self.hash_to_block_id[block_hash]
            self.block_hashes[block_id] = None

    def check(self) -> None:
        """Raise InvariantError unless each block is either free, cached or held, and hashes and blocks agree."""
        free = set(self.free_block_ids)
        require(len(free) == len(self.free_block_ids), "a block is free twice")
        require(not free & self.cached.keys(), "a block is free and cached")
        for block_id, num_references in enumerate(self.num_references):
            is_idle = block_id in free or block_id in self.cached
            require((num_references == 0) == is_idle, f"block {block_id} is neither idle nor held, or both")
            block_hash = self.block_hashes[block_id]
            require(block_hash is None or self.hash_to_block_id[block_hash] == block_id, f"hash of block {block_id}")
            require(block_id not in self.cached or block_hash is not None, f"cached block {block_id} has no hash")
            require(block_id not in free or block_hash is None, f"free block {block_id} has a hash")
        named = sum(block_hash is not None for block_hash in self.block_hashes)
        require(named == len(self.hash_to_block_id), "a hash names a block that does not know it")
