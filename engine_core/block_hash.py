"""The name of a block's content: a hash chained from block to block.

    root   = BLAKE2b(model, adapter, salt), each field behind its tag and its length
    block  = BLAKE2b(hash of the block before it, or root; ids of its block_size tokens, four bytes each)

Two blocks have one hash only if the same model computed them from the same tokens with the same beginning for requests
that may share. Invariant: both encodings are injective, so equal hashes mean equal content but for collisions of 128
bits of BLAKE2b, which nobody can construct. Rejected: Python's `hash` (weak, and salted per process), a hash per
block without the chain (the KV of a token depends on all before it), SHA-256 (equally good, half as fast here).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

DIGEST_BYTES = 16
TOKEN_BYTES = 4

_empty_block = blake2b(digest_size=DIGEST_BYTES, person=b"octavo.block")


@lru_cache(maxsize=1024)  # few tenants and salts, many requests
def hash_root(model: str, adapter: str, salt: str) -> bytes:
    """The hash before the first block: whose KV it is, and who may share it."""
    root = blake2b(digest_size=DIGEST_BYTES, person=b"octavo.root")
    for tag, value in ((b"M", model), (b"A", adapter), (b"S", salt)):
        data = value.encode("utf-8", "surrogatepass")
        root.update(tag + len(data).to_bytes(8, "little") + data)
    return root.digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append the hashes of the full blocks in `token_ids`, the tokens that follow those which `hashes` covers.

    Raises OverflowError for a token id that does not fit into four bytes.
    """
    data = array("I", token_ids).tobytes()
    num_bytes = block_size * TOKEN_BYTES
    parent = hashes[-1] if hashes else root
    new_hash = _empty_block.copy
    for start in range(0, len(data) - num_bytes + 1, num_bytes):
        block = new_hash()
        block.update(parent + data[start : start + num_bytes])
        parent = block.digest()
        hashes.append(parent)
