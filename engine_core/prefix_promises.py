"""Which blocks of prompts are about to be computed, and by whom.

Invariant: a hash is promised as long as a running request will compute that block in a later step. A waiting request
that needs it stands aside until then, instead of computing it a second time; if the promise is withdrawn, because the
maker was preempted or ended, it goes on by itself. Rejected: making everybody wait who shares any beginning with a
waiting request: whoever is first in the queue is admitted before the others are looked at, so one maker is enough.
"""

from __future__ import annotations

from octavo.engine_core.request import Request


class PrefixPromises:
    """Hashes of blocks to come, by maker."""

    def __init__(self) -> None:
        self.makers: dict[bytes, str] = {}
        self._hashes: dict[str, list[bytes]] = {}

    def promise(self, request: Request) -> None:
        """The request will compute the rest of its named blocks."""
        hashes = [h for h in request.block_hashes[request.num_registered_blocks :] if h not in self.makers]
        if hashes:
            self._hashes[request.request_id] = hashes
            self.makers.update(dict.fromkeys(hashes, request.request_id))

    def fulfil(self, request: Request, first_block: int) -> None:
        """The blocks from `first_block` to the last registered one are there."""
        if request.request_id in self._hashes:
            for block_hash in request.block_hashes[first_block : request.num_registered_blocks]:
                if self.makers.get(block_hash) == request.request_id:
                    del self.makers[block_hash]

    def withdraw(self, request: Request) -> None:
        """The request computes no more blocks of its prompt."""
        for block_hash in self._hashes.pop(request.request_id, ()):
            if self.makers.get(block_hash) == request.request_id:
                del self.makers[block_hash]

    def last_awaited(self, hashes: list[bytes]) -> bytes | None:
        """Of blocks that follow each other, the last of those promised without a gap from the first."""
        awaited = None
        for block_hash in hashes:
            if block_hash not in self.makers:
                break
            awaited = block_hash
        return awaited
