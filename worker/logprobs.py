"""Raw logprobs of tokens and of the likeliest ones beside them: on the device they are found, on the host packed.

Raw are the model's own: before anything that a request does to its logits. The likeliest tokens are listed at once; the
drawn token's logprob is read when it is known, so a step that edits logits keeps a copy of the rows that ask. Its bits
are those that it has among the likeliest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.kernels.ops.token_logprobs import token_logprobs
from octavo.protocol.logprobs import NO_ENTRY, TokenLogprobs


class RowLogprobs(NamedTuple):
    """Logprobs of M rows, on either side.

    Attributes:
        own: fp32 [M], of each row's own token.
        token_ids, logprobs: int64 and fp32 [M, num_listed], the likeliest tokens; None when no row lists any.
    """

    own: torch.Tensor
    token_ids: torch.Tensor | None
    logprobs: torch.Tensor | None


class RawRows:
    """Rows whose logits are as the model gave them."""

    def __init__(self, logits: torch.Tensor, num_listed: int, rows: torch.Tensor | None = None) -> None:
        """`logits` fp32 [num_rows, vocab_size]; `rows` int64 [M], which of them, None for all.

        They must not change before `logprobs_of`.
        """
        self.logits = logits
        self.rows = torch.arange(len(logits), device=logits.device) if rows is None else rows
        self.token_ids, self.logprobs = None, None
        if num_listed:
            self.token_ids, self.logprobs = likeliest_tokens(logits, num_listed, rows=rows)

    def logprobs_of(self, token_ids: torch.Tensor) -> RowLogprobs:
        """Return what there is to say of the rows when they have got `token_ids`, int64 [M]."""
        return RowLogprobs(token_logprobs(self.logits, self.rows, token_ids), self.token_ids, self.logprobs)


class PackedRows:
    """Rows on the host, each with its own token first and then the likeliest."""

    def __init__(self, own_token_ids: np.ndarray, found: RowLogprobs, num_listed: int) -> None:
        """`own_token_ids` int64 [M]; rows have `num_listed` entries more, NO_ENTRY where the vocabulary has fewer."""
        shape = (len(own_token_ids), 1 + num_listed)
        self.token_ids = np.full(shape, NO_ENTRY, "<i4")
        self.logprobs = np.full(shape, -np.inf, "<f4")
        self.token_ids[:, 0], self.logprobs[:, 0] = own_token_ids, found.own.numpy()
        if found.token_ids is not None and found.logprobs is not None:
            end = 1 + found.token_ids.shape[1]
            self.token_ids[:, 1:end], self.logprobs[:, 1:end] = found.token_ids.numpy(), found.logprobs.numpy()

    def pack(self, start: int, stop: int, num_listed: int) -> TokenLogprobs:
        """Return the rows from `start` to before `stop`, cut to `num_listed` of the likeliest tokens."""
        width = 1 + num_listed
        token_ids, logprobs = self.token_ids[start:stop, :width], self.logprobs[start:stop, :width]
        return TokenLogprobs(num_listed, token_ids.tobytes(), logprobs.tobytes())
