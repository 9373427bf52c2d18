"""Memory of large results that is kept from one call to the next, so that the system does not clear it each time.

A fresh allocation of megabytes costs a page fault for every 4 KiB, which takes longer than writing them. Invariant: a
buffer is lent to one result at a time, and comes back only when every tensor that shares its memory is gone.
"""

from __future__ import annotations

import math
import weakref

import numpy as np
import torch


class KeptMemory:
    """Keeps the largest buffer that has come back."""

    def __init__(self) -> None:
        self._kept = np.empty(0, np.float32)

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an uninitialised fp32 tensor."""
        num_elements = math.prod(shape)
        buffer, self._kept = self._kept, np.empty(0, np.float32)
        if len(buffer) < num_elements:
            buffer = np.empty(num_elements, np.float32)
        lent = buffer[:num_elements]  # dies with the last tensor that shares its memory
        weakref.finalize(lent, self._take_back, buffer)
        return torch.from_numpy(lent).view(shape)

    def _take_back(self, buffer: np.ndarray) -> None:
        if len(buffer) > len(self._kept):
            self._kept = buffer


LOGITS = KeptMemory()
"""Logits of a batch are megabytes, are made outside of recorded lists, and are gone when the step has sampled."""
