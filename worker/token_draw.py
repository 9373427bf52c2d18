"""The end of a step on the device: edits, draws, logprobs, counts, in the one order that is right.

Logprobs are of the logits before they are edited, tokens are drawn after, and what was drawn counts for the step after
this one. The largest step goes the same way, so that its memory is that of real ones.
"""

from __future__ import annotations

import torch

from octavo.worker.logits_edits import NO_EDITS, LogitsEdits, edit_batch
from octavo.worker.logprobs import RawRows, RowLogprobs
from octavo.worker.sampler import Sampler
from octavo.worker.step_inputs import REPORTING, sampling_batch


def draw_tokens(
    logits: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    num_listed: int,
    last_token_ids: torch.Tensor,
    sampler: Sampler,
    edits: LogitsEdits,
) -> tuple[torch.Tensor, RowLogprobs | None]:
    """Draw a token for each row, and find the logprobs that are asked for.

    Args:
        logits: fp32 [D, vocab_size]; overwritten.
        tensors: the step's, among them `choice_arrays`.
        num_listed: the likeliest tokens to list for each row that reports logprobs.
        last_token_ids: int64 [num_rows], each row's last token before this step.

    Returns:
        int64 [D], INVALID_TOKEN_ID for a row that is no distribution, and the logprobs of the reporting rows; None when
        there are none.
    """
    reporting, batch, raw_rows = tensors.get(REPORTING), edit_batch(tensors), None
    if reporting is not None and batch is NO_EDITS:
        raw_rows = RawRows(logits, num_listed, reporting)
    elif reporting is not None:
        raw_rows = RawRows(logits.index_select(0, reporting), num_listed)
    if batch is not NO_EDITS:
        edits.apply(logits, batch, last_token_ids)
    token_ids = sampler.sample(logits, sampling_batch(tensors))
    edits.count(batch, token_ids)
    return token_ids, None if raw_rows is None else raw_rows.logprobs_of(token_ids[reporting])
