"""One step as tensors: the tokens to compute, their positions, and where their keys and values go.

A pure function of the rows and the decision. Requests stand in the order of `num_scheduled_tokens`; the tokens of one
request are neighbours. A request whose chunk reaches its last known token is sampled; that is the only difference
between prefill and decode.

    request            a         b            c
    token_ids     a7 a8 a9      b4       c0 c1 c2 c3          T = 8
    query_start_loc  0           3          4          8
    seq_lens        10           5          4
    sampled_tokens        2      3          (7, if c has 4 tokens)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from octavo.worker.layers.attention import AttentionMetadata
from octavo.worker.request_states import RequestStates


class InputBatch(NamedTuple):
    """Inputs of one step; R requests, T tokens, S sampled requests.

    Attributes:
        request_ids: of the R requests.
        rows: int64 [R], their rows.
        num_scheduled_tokens: int64 [R].
        token_ids, positions: int64 [T].
        metadata: where the tokens belong in the KV cache.
        sampled_requests: int64 [S], indices among the R.
        sampled_tokens: int64 [S], the last token of each sampled request, index among the T.
    """

    request_ids: list[str]
    rows: np.ndarray
    num_scheduled_tokens: np.ndarray
    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    sampled_requests: np.ndarray
    sampled_tokens: torch.Tensor


def _check(
    states: RequestStates, request_ids: list[str], rows: np.ndarray, seq_lens: np.ndarray, block_size: int
) -> None:
    """Raise ValueError when a step asks for tokens that are not known or for slots that the request does not hold."""
    is_wrong = (seq_lens > states.num_tokens[rows]) | (seq_lens > states.num_blocks[rows] * block_size)
    if is_wrong.any():
        index = int(is_wrong.argmax())
        row = rows[index]
        raise ValueError(
            f"request {request_ids[index]}: step reaches token {seq_lens[index]}, but there are "
            f"{states.num_tokens[row]} tokens and {states.num_blocks[row]} blocks of {block_size}"
        )


def make_input_batch(
    states: RequestStates, num_scheduled_tokens: dict[str, int], block_size: int, device: torch.device
) -> InputBatch | None:
    """Return the step's inputs, or None when there is nothing to compute; requests that have failed are left out.

    Raises KeyError for a request without a row, ValueError for a step that reaches past a request's tokens or blocks.
    """
    request_ids = [name for name in num_scheduled_tokens if not states.has_failed[states.rows[name]]]
    if not request_ids:
        return None
    rows = np.array([states.rows[name] for name in request_ids])
    num_tokens = np.array([num_scheduled_tokens[name] for name in request_ids])
    starts = states.num_computed_tokens[rows]
    seq_lens = starts + num_tokens
    _check(states, request_ids, rows, seq_lens, block_size)

    query_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(num_tokens, out=query_start_loc[1:])
    row_of_token = np.repeat(rows, num_tokens)
    positions = np.arange(len(row_of_token)) + np.repeat(starts - query_start_loc[:-1], num_tokens)
    max_blocks = -(-int(seq_lens.max()) // block_size)
    blocks = states.block_tables[row_of_token, positions // block_size].astype(np.int64)
    sampled_requests = np.flatnonzero(seq_lens == states.num_tokens[rows])

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return InputBatch(
        request_ids=request_ids,
        rows=rows,
        num_scheduled_tokens=num_tokens,
        token_ids=on_device(states.token_ids[row_of_token, positions]),
        positions=on_device(positions),
        metadata=AttentionMetadata(
            query_start_loc=on_device(query_start_loc),
            seq_lens=on_device(seq_lens.astype(np.int32)),
            block_tables=on_device(states.block_tables[rows, :max_blocks]),
            slot_mapping=on_device(blocks * block_size + positions % block_size),
        ),
        sampled_requests=sampled_requests,
        sampled_tokens=on_device(query_start_loc[1:][sampled_requests].astype(np.int64) - 1),
    )
