"""Blocks of one memory tier: which are free, and how many references each of the others has.

Invariant: a block is in the free list if and only if nothing refers to it, and it is there once. The free list is a
stack that starts with the low ids on top and takes freed blocks back on top: a block is used for the first time only
when all used before are taken, so memory that is never needed is never touched. Rejected: a first-in first-out list,
which walks through the whole tier, and a set, whose order is nobody's decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine_core.invariants import require


class BlockPool:
    """The blocks 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free_block_ids = list(range(num_blocks - 1, -1, -1))
        self.num_references = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_block_ids)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` free blocks with one reference each; None, and nothing taken, when there are fewer."""
        if num_blocks > len(self.free_block_ids):
            return None
        block_ids = [self.free_block_ids.pop() for _ in range(num_blocks)]
        for block_id in block_ids:
            self.num_references[block_id] = 1
        return block_ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each block; those without any are free again, the first on top."""
        for block_id in reversed(block_ids):
            num_references = self.num_references[block_id] - 1
            require(num_references >= 0, f"block {block_id} freed twice")
            self.num_references[block_id] = num_references
            if num_references == 0:
                self.free_block_ids.append(block_id)

    def check(self) -> None:
        """Raise InvariantError unless each block is either free, once, or referred to."""
        free = set(self.free_block_ids)
        require(len(free) == len(self.free_block_ids), "a block is free twice")
        for block_id, num_references in enumerate(self.num_references):
            require((num_references == 0) == (block_id in free), f"block {block_id} is neither free nor held, or both")
