"""The memory of packed weights.

Weights lie one behind the other in large pieces, which the system may hold in huge pages: a step reads all of them
once, and with small pages the walks through the page table take up to a third of the time of a step with one token.
Rejected: memory of its own for each weight, which in small models is smaller than a huge page.
"""

from __future__ import annotations

import torch

from octavo.worker.host import HUGE_PAGE_BYTES, use_huge_pages

PIECE_BYTES = 64 << 20  # of which what is not given out takes no memory
ALIGNMENT = 64


class WeightMemory:
    """Gives out memory on one device, for as long as the weights last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return zeros, uint8 [num_bytes], aligned to 64 bytes; on the meta device without memory."""
        if self._device.type != "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        num_aligned = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if num_aligned > len(self._left):
            piece = torch.empty(max(PIECE_BYTES, num_aligned) + HUGE_PAGE_BYTES, dtype=torch.uint8)
            use_huge_pages(piece.data_ptr(), len(piece))
            self._left = piece[-piece.data_ptr() % HUGE_PAGE_BYTES :]
        taken, self._left = self._left[:num_bytes], self._left[num_aligned:]
        return taken.zero_()
