"""How often each row's output has each token, and which tokens its prompt has: what penalties are made of.

It stays on the device and counts there what is drawn there, so that a step needs not the result of the one before.
Invariant: the counts of a row are a function of its request's tokens, because `assign` rewrites all of them; so
penalties are the same after a preemption or a restart. Rows that nobody assigned hold anything. The memory is taken
when the first request has penalties, and on a CPU the system gives pages of it only where a row was assigned. Rejected:
each row's tokens in a list with their counts, of which two steps in flight would need the lengths.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.kernels.ops.logits_edits import IN_PROMPT
from octavo.worker.device import Device


class PenaltyCounts:
    """Counts for `num_rows` rows.

    Attributes:
        counts: int32 [num_rows, vocab_size] on the device, as `RowEdits.counts`; None before the first `assign`.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: Device) -> None:
        self.shape = (num_rows, vocab_size)
        self.counts: torch.Tensor | None = None
        self._device = device

    def assign(self, row: int, prompt_token_ids: np.ndarray, output_token_ids: np.ndarray) -> None:
        """Replace the counts of `row`; does not wait for the device.

        Raises IndexError or ValueError for a token id beyond the vocabulary.
        """
        if self.counts is None:
            self.counts = torch.empty(self.shape, dtype=torch.int32, device=self._device.torch_device)
        vocab_size = self.shape[1]
        on_host = self._device.empty_host((vocab_size,), torch.int32)
        counts = on_host.numpy()
        counts[:] = np.bincount(output_token_ids, minlength=vocab_size)
        counts[prompt_token_ids] |= IN_PROMPT
        self.counts[row].copy_(on_host, non_blocking=True)

    def add(self, count_rows: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Count drawn tokens; some row must have been assigned before.

        Args:
            count_rows: int64 [num_drawn] on the device, as `RowEdits.count_rows`: -1 for a token that is not counted,
                and no other number twice.
            token_ids: int64 [num_drawn] on the device; INVALID_TOKEN_ID is not counted.
        """
        is_counted = (count_rows >= 0) & (token_ids >= 0)
        places = (count_rows * self.shape[1] + token_ids).masked_fill_(~is_counted, 0)
        self.counts.view(-1).index_add_(0, places, is_counted.int())
