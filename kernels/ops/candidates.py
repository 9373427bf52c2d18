"""The likeliest tokens of each row of logits: what a beam search chooses from.

A row's result is a function of that row alone. Equals are told apart by token id, which `topk` does not promise; so it
only finds the cut, and what is at the cut is chosen by counting. Some rows at a time, because that takes four times the
memory of the rows, and a step has to fit where the largest step without candidates did. Rejected: a stable sort of the
whole vocabulary, some ten times slower.
"""

from __future__ import annotations

import torch

from octavo.kernels.ops.sampling import INVALID_TOKEN_ID
from octavo.kernels.registry import op

ROWS_AT_A_TIME = 16


@op
def likeliest_tokens(
    logits: torch.Tensor, num_tokens: int, masked: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the likeliest tokens of each row, likeliest first, and their logprobs; equals by ascending token id.

    Logprobs are those of the whole row, masked tokens included: what is masked takes no probability to the others.

    Args:
        logits: fp32 [num_rows, vocab_size].
        num_tokens: tokens to list per row, at least 1; no more than vocab_size are listed.
        masked: int64 [2, num_masked], rows of the result and token ids that are not to be listed.
        rows: int64 [num_lists], which rows of `logits` to list, in any order; None lists all.

    Returns:
        int64 [num_lists, min(num_tokens, vocab_size)] token ids, and fp32 logprobs of the same shape. Where a row has
        no further token that is possible and not masked: INVALID_TOKEN_ID and -inf; so in all of a row that is no
        distribution: that has a NaN or +inf, or nothing but -inf.
    """
    logprobs = logits.log_softmax(-1) if rows is None else _logprobs_of_rows(logits, rows)
    logprobs.masked_fill_(logprobs.isnan(), -torch.inf)
    if masked is not None:
        logprobs[masked[0], masked[1]] = -torch.inf
    num_listed = min(num_tokens, logits.shape[1])
    lists = [_list_likeliest(some, num_listed) for some in logprobs.split(ROWS_AT_A_TIME)]
    token_ids, listed = (torch.cat(parts) for parts in zip(*lists, strict=True))
    return token_ids.masked_fill_(listed.isneginf(), INVALID_TOKEN_ID), listed


def _logprobs_of_rows(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return logprobs, fp32 [len(rows), vocab_size], NaN in a row that is no distribution; no second copy of them."""
    logprobs = logits.new_empty(len(rows), logits.shape[1])
    for some_rows, into in zip(rows.split(ROWS_AT_A_TIME), logprobs.split(ROWS_AT_A_TIME), strict=True):
        torch.log_softmax(logits[some_rows], -1, out=into)
    return logprobs


def _list_likeliest(logprobs: torch.Tensor, num_listed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and logprobs of rows without NaN, impossible tokens among them."""
    cut = logprobs.topk(num_listed).values[:, -1:]
    is_above, is_at_cut = logprobs > cut, logprobs == cut
    num_at_cut = num_listed - is_above.sum(-1, keepdim=True)
    is_listed = is_above | (is_at_cut & (is_at_cut.cumsum(-1) <= num_at_cut))
    # As many in each row as are listed: a device need not be asked how many there are.
    token_ids = torch.nonzero_static(is_listed, size=len(logprobs) * num_listed)[:, 1].view(-1, num_listed)
    listed, order = logprobs.gather(1, token_ids).sort(descending=True, stable=True)
    return token_ids.gather(1, order), listed
