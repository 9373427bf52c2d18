"""The tokens that a row may give at all, as bits on the device: a row of them for each row of the worker.

Invariant: the bits of a row are those of its request: `assign` rewrites all of them, and where a grammar says what may
come next, `write` does so before each token (`grammar_masks`); those of a row that nobody wrote mean nothing. The
memory is taken when the first request restricts its tokens. Rejected: sending the bits with every step, though most do
not change; and lists of what is forbidden, which are as long as the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from octavo.kernels.ops.logits_edits import WORD_BITS
from octavo.worker.device import Device


def pack_bits(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return int32 [ceil(vocab_size / 32)], as a row of `RowEdits.bitmask`: the bits of `token_ids` are set."""
    num_words = -(-vocab_size // WORD_BITS)
    is_allowed = np.zeros(num_words * WORD_BITS, np.bool_)
    is_allowed[list(token_ids)] = True
    return np.packbits(is_allowed, bitorder="little").view("<i4")


def unpack_bits(bits: np.ndarray) -> list[int]:
    """Return the token ids whose bits are set in int32 [any number], ascending."""
    return np.flatnonzero(np.unpackbits(bits.astype("<i4").view(np.uint8), bitorder="little")).tolist()


class TokenMasks:
    """Bits for `num_rows` rows.

    Attributes:
        num_words: of the bits of a row, ceil(vocab_size / 32).
        bits: int32 [num_rows, num_words] on the device, as `RowEdits.bitmask`; None before the first row was written.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // WORD_BITS)
        self.bits: torch.Tensor | None = None
        self._device = device

    def pack(self, token_ids: Iterable[int]) -> np.ndarray:
        """Return the bits, int32 [num_words], of those of `token_ids` that are in the vocabulary."""
        return pack_bits((i for i in token_ids if i < self.vocab_size), self.vocab_size)

    def assign(self, row: int, token_ids: Iterable[int]) -> None:
        """Let `row` give these tokens and no other; does not wait for the device."""
        on_host = self._device.empty_host((self.num_words,), torch.int32)
        on_host.numpy()[:] = self.pack(token_ids)
        self.write(row, on_host)

    def write(self, row: int, on_host: torch.Tensor) -> None:
        """Replace the bits of `row` by int32 [num_words] from `Device.empty_host`; does not wait for the device."""
        if self.bits is None:
            shape = (self.num_rows, self.num_words)
            self.bits = torch.empty(shape, dtype=torch.int32, device=self._device.torch_device)
        self.bits[row].copy_(on_host, non_blocking=True)
