"""The logprobs of given tokens: of those that were drawn, and of those of a prompt.

A result is a function of one row of logits and one token id, with the bits that `likeliest_tokens` lists for them, so
that a token never has two logprobs. GPUs run the torch reference, which takes some rows at a time for the sake of
memory.
"""

from __future__ import annotations

import torch

from octavo.kernels.ops.candidates import ROWS_AT_A_TIME
from octavo.kernels.registry import op


@op
def token_logprobs(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the logprobs of tokens, each in a row of logits.

    Args:
        logits: fp32 [num_rows, vocab_size].
        rows: int64 [num_tokens], rows of `logits`, in any order, and any of them more than once.
        token_ids: int64 [num_tokens]; INVALID_TOKEN_ID for no token.

    Returns:
        fp32 [num_tokens]; -inf for an impossible token; NaN where there is no token, and where the row is no
        distribution: it has a NaN or +inf, or nothing but -inf.

    Raises:
        IndexError: for a row or a token id that is outside of `logits`.
    """
    logprobs = [
        logits[some_rows].log_softmax(-1).gather(1, some_ids.clamp(min=0)[:, None])[:, 0]
        for some_rows, some_ids in zip(rows.split(ROWS_AT_A_TIME), token_ids.split(ROWS_AT_A_TIME), strict=True)
    ]
    return torch.cat(logprobs).masked_fill_(token_ids < 0, torch.nan)
