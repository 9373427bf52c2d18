"""What requests do to their logits before a token is drawn: forbidden tokens, bias, penalties.

Invariant: each logit changes by what its own row asks for, so a row's result is the same among any others. Changes have
the order of vLLM: forbidden tokens, bias, repetition, frequency and presence penalty; all before the temperature. What
is forbidden is lowered by infinity instead of set to it, so that a NaN stays one and the row is reported. GPUs run the
torch reference. Rejected: lists of each row's tokens instead of counts of the whole vocabulary, because a token that
the host has not seen yet could not be in them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.kernels.registry import op

ROWS_AT_A_TIME = 64
WORD_BITS = 32
IN_PROMPT = -(2**31)
"""The bit of a count that says that the token stands in the prompt."""

MAX_COUNT = 2**31 - 1
"""The other bits: how often the token stands in the output."""


class RowEdits(NamedTuple):
    """What the rows of logits ask for; None where no row does.

    Attributes:
        bitmask: int32 [num_masks, ceil(vocab_size / 32)]; bit v % 32 of word v // 32: token v may be drawn.
        mask_rows: int64 [num_rows], each row's row of `bitmask`; -1: all tokens may be drawn. None like `bitmask`.
        banned: int64 [2, num_banned], rows and token ids that must not be drawn; each pair once.
        bias: int64 [2, num_biased], rows and token ids, each pair once, and fp32 [num_biased], what is added to them.
        counts: int32 [any number, vocab_size]; bits 0 to 30: how often the output has the token; bit 31: the prompt
            has it. None when no row has penalties, as the next four.
        count_rows: int64 [num_rows], each row's row of `counts`; -1: no penalties.
        repetition: fp32 [num_rows], above 0: divides logits above 0 and multiplies others, of tokens in the prompt or
            the output.
        presence: fp32 [num_rows], is taken off the logits of tokens in the output.
        frequency: fp32 [num_rows], times the count, is taken off the logits of tokens in the output.
    """

    bitmask: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None
    banned: torch.Tensor | None = None
    bias: tuple[torch.Tensor, torch.Tensor] | None = None
    counts: torch.Tensor | None = None
    count_rows: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    frequency: torch.Tensor | None = None


@op
def edit_logits(logits: torch.Tensor, edits: RowEdits) -> None:
    """Change `logits`, fp32 [num_rows, vocab_size], contiguous, in place, by what its rows ask for.

    A forbidden token gets -inf, whatever else its row asks for; a NaN stays one, and +inf that is forbidden becomes
    one. Raises IndexError, perhaps with some of the changes made, for a row or a token id that is outside.
    """
    if edits.bitmask is not None:
        for rows, mask_rows in zip(logits.split(ROWS_AT_A_TIME), edits.mask_rows.split(ROWS_AT_A_TIME), strict=True):
            _mask(rows, edits.bitmask, mask_rows)
    if edits.banned is not None:
        rows, token_ids = edits.banned
        logits[rows, token_ids] -= torch.inf
    if edits.bias is not None:
        (rows, token_ids), values = edits.bias
        logits[rows, token_ids] += values
    if edits.counts is not None:
        options = (edits.count_rows, edits.repetition, edits.presence, edits.frequency)
        for part in zip(*(each.split(ROWS_AT_A_TIME) for each in (logits, *options)), strict=True):
            _penalize(part[0], edits.counts, *part[1:])


def _mask(logits: torch.Tensor, bitmask: torch.Tensor, mask_rows: torch.Tensor) -> None:
    words = bitmask[mask_rows.clamp(min=0), :, None]
    bits = (words >> torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)) & 1
    is_allowed = bits.flatten(1)[:, : logits.shape[1]].bool() | (mask_rows < 0)[:, None]
    logits.sub_(torch.where(is_allowed, 0.0, torch.inf))


def _penalize(
    logits: torch.Tensor,
    counts: torch.Tensor,
    count_rows: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    counts = counts[count_rows.clamp(min=0)].masked_fill_((count_rows < 0)[:, None], 0)
    repetition, presence, frequency = repetition[:, None], presence[:, None], frequency[:, None]
    num_in_output = counts & MAX_COUNT
    edited = torch.where(logits > 0, logits / repetition, logits * repetition)
    edited.sub_(num_in_output * frequency).sub_(torch.where(num_in_output > 0, presence, 0.0))
    logits.copy_(torch.where(counts != 0, edited, logits))
