"""Whether all ranks executed the same steps, byte for byte.

Each rank chains a checksum over the frames of its steps; rank 0's travels with the sampled tokens of every step, and a
rank that has another one stops before it answers for anything. What a rank computes is a function of its frames, so
equal frames mean equal inputs. It is a check against faults, not against malice: CRC-32 (zlib) is enough.
"""

from __future__ import annotations

import zlib

import torch

from octavo.worker.distributed import RankDivergedError


class StepChecksum:
    """The checksum of all frames so far, in their order."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, frame: bytes) -> None:
        """Take in the frame of the step that is executed next."""
        self.value = zlib.crc32(frame, self.value)


def with_checksum(token_ids: torch.Tensor, checksum: int) -> torch.Tensor:
    """Return int64 [S + 1]: `token_ids`, int64 [S], then the checksum."""
    packed = token_ids.new_empty(len(token_ids) + 1)
    packed[:-1] = token_ids
    packed[-1] = checksum
    return packed


def require_same(received: int, own: int, rank: int) -> None:
    """Raise RankDivergedError unless rank 0's checksum, `received`, is this rank's own."""
    if received != own:
        raise RankDivergedError(
            f"rank {rank} executed other steps than rank 0: their checksums are {own:08x} and {received:08x}"
        )
