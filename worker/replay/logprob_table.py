"""Logprobs of a token that nothing computed: a table that follows from the token and one number.

The token itself is the likeliest, the ids behind it (round the end of the vocabulary) follow, each less likely than the
one before by 1. So the same request gets the same logprobs however its steps were cut.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from octavo.protocol.logprobs import NO_ENTRY, TokenLogprobs
from octavo.protocol.worker_messages import Candidates


class LogprobTable(NamedTuple):
    """The table of one answer; `logprob` is that of its tokens."""

    logprob: float
    vocab_size: int

    def candidates(self, token_id: int, num_candidates: int) -> Candidates:
        """Return the likeliest tokens, fewer when the vocabulary has no more."""
        num = min(num_candidates, self.vocab_size)
        token_ids = [(token_id + rank) % self.vocab_size for rank in range(num)]
        return Candidates(token_ids, [self.logprob - rank for rank in range(num)])

    def rows(self, token_ids: Iterable[int], num_listed: int) -> TokenLogprobs:
        """Return a row for each token: itself, then the likeliest `num_listed`."""
        all_ids: list[int] = []
        all_logprobs: list[float] = []
        for token_id in token_ids:
            listed = self.candidates(token_id, num_listed)
            num_missing = num_listed - len(listed.token_ids)
            all_ids += [token_id, *listed.token_ids, *[NO_ENTRY] * num_missing]
            all_logprobs += [self.logprob, *listed.logprobs, *[-float("inf")] * num_missing]
        return TokenLogprobs(
            num_listed, struct.pack(f"<{len(all_ids)}i", *all_ids), struct.pack(f"<{len(all_logprobs)}f", *all_logprobs)
        )
