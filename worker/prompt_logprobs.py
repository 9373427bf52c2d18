"""Raw logprobs of the prompt's own tokens, for requests that ask for them: a chunk at a time, as chunks are computed.

The hidden state of a prompt token says how likely the next one was. Such states go through the output head
ROWS_AT_A_TIME together, so the memory for their logits does not grow with the prompt; where the head is row-invariant,
neither that nor the chunks change a bit. How many times the head runs follows from the step alone: with several ranks
all run it as often, in the same order, though rank 0 alone has the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from octavo.protocol.logprobs import PromptLogprobs
from octavo.worker.input_batch import InputBatch
from octavo.worker.logprobs import PackedRows, RawRows, RowLogprobs
from octavo.worker.request_states import RequestStates

ROWS_AT_A_TIME = 64
HIDDEN_ROWS, NEXT_TOKENS = "prompt_hidden_rows", "prompt_next_tokens"


class PromptChunk(NamedTuple):
    """Prompt tokens of one request whose logprobs a step finds.

    Attributes:
        request_id: whose they are.
        first_position: of the first of them in the prompt.
        num_tokens: that many.
        num_listed: of the likeliest tokens to each.
    """

    request_id: str
    first_position: int
    num_tokens: int
    num_listed: int


class PromptTokens(NamedTuple):
    """The M prompt tokens of a step, in the order of `chunks`.

    Attributes:
        hidden_rows: int64 [M], of each the token before it, among those of the step.
        token_ids: int64 [M].
    """

    chunks: list[PromptChunk]
    hidden_rows: np.ndarray
    token_ids: np.ndarray

    @property
    def num_listed(self) -> int:
        return max(chunk.num_listed for chunk in self.chunks)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what the device needs."""
        return {HIDDEN_ROWS: self.hidden_rows, NEXT_TOKENS: self.token_ids}


def find_prompt_tokens(states: RequestStates, batch: InputBatch) -> PromptTokens | None:
    """Return the prompt tokens whose logprobs the step has to find, before its tokens count as computed."""
    nums_listed = states.sampling.num_prompt_logprobs[batch.rows]
    is_asking = nums_listed >= 0
    if not is_asking.any():
        return None
    chunks, hidden_rows, token_ids = [], [], []
    for index in np.flatnonzero(is_asking).tolist():
        row = batch.rows[index]
        start = int(states.num_computed_tokens[row])
        last = int(states.num_prompt_tokens[row]) - 1  # nothing of the prompt comes after it
        stop = min(start + int(batch.num_scheduled_tokens[index]), last)
        if start < stop:
            request_id = states.request_ids[row]
            chunks.append(PromptChunk(request_id, start + 1, stop - start, int(nums_listed[index])))
            hidden_rows.append(batch.query_start_loc[index] + np.arange(stop - start))
            token_ids.append(states.token_ids[row, start + 1 : stop + 1])
    return PromptTokens(chunks, np.concatenate(hidden_rows), np.concatenate(token_ids)) if chunks else None


def find_logprobs(
    compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    hidden: torch.Tensor,
    tensors: dict[str, torch.Tensor],
    num_listed: int,
) -> RowLogprobs | None:
    """Return the logprobs of the prompt tokens of a step on the device, None on the ranks that get no logits.

    Args:
        compute_logits: the model's head.
        hidden: [T, hidden_size].
        tensors: the step's, among them `PromptTokens.arrays`.
        num_listed: the likeliest tokens to list in each row.
    """
    parts = []
    for rows, token_ids in zip(
        tensors[HIDDEN_ROWS].split(ROWS_AT_A_TIME), tensors[NEXT_TOKENS].split(ROWS_AT_A_TIME), strict=True
    ):
        logits = compute_logits(hidden[rows])
        if logits is not None:
            parts.append(RawRows(logits, num_listed).logprobs_of(token_ids))
    if not parts:
        return None
    return RowLogprobs(*(None if each[0] is None else torch.cat(each) for each in zip(*parts, strict=True)))


def pack_prompt_logprobs(prompt_tokens: PromptTokens, found: RowLogprobs) -> dict[str, PromptLogprobs]:
    """Return what the requests get, when the logprobs are on the host."""
    rows = PackedRows(prompt_tokens.token_ids, found, prompt_tokens.num_listed)
    packed, start = {}, 0
    for chunk in prompt_tokens.chunks:
        stop = start + chunk.num_tokens
        packed[chunk.request_id] = PromptLogprobs(chunk.first_position, rows.pack(start, stop, chunk.num_listed))
        start = stop
    return packed
