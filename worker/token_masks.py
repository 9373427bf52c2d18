"""The tokens that a row may give at all, as bits on the device: a row of them for each row of the worker.

Invariant: the bits of a row are those of its request, because `assign` rewrites all of them; those of a row that nobody
assigned mean nothing. The memory is taken when the first request restricts its tokens. Rejected: sending the bits with
every step, though they do not change; and lists of what is forbidden, which are as long as the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from octavo.kernels.ops.logits_edits import WORD_BITS
from octavo.worker.device import Device


def pack_bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return int32 [ceil(vocab_size / 32)], as a row of `RowEdits.bitmask`: the bits of `token_ids` are set."""
    num_words = -(-vocab_size // WORD_BITS)
    is_allowed = np.zeros(num_words * WORD_BITS, np.bool_)
    is_allowed[list(token_ids)] = True
    return np.packbits(is_allowed, bitorder="little").view("<i4")


class TokenMasks:
    """Bits for `num_rows` rows.

    Attributes:
        bits: int32 [num_rows, ceil(vocab_size / 32)] on the device, as `RowEdits.bitmask`; None before the first
            `assign`.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.bits: torch.Tensor | None = None
        self._device = device

    def assign(self, row: int, token_ids: Sequence[int]) -> None:
        """Let `row` give these tokens, all below vocab_size, and no other; does not wait for the device."""
        packed = pack_bits(token_ids, self.vocab_size)
        if self.bits is None:
            shape = (self.num_rows, len(packed))
            self.bits = torch.empty(shape, dtype=torch.int32, device=self._device.torch_device)
        on_host = self._device.empty_host(packed.shape, torch.int32)
        on_host.numpy()[:] = packed
        self.bits[row].copy_(on_host, non_blocking=True)
