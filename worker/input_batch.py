"""One step as arrays on the host: the tokens to compute, their positions, and where their keys and values go.

A pure function of the rows and the decision. A token that only the device knows yet stands as what the rows say of it.
First stand the steady requests with one token each, in the order in which they joined, then the others in the order of
`num_scheduled_tokens`; the tokens of one request are neighbours. A request whose chunk reaches its last known token is
sampled; that is the only difference between prefill and decode. Steady requests are only ever touched as arrays. A
request that has failed is computed like any other until it is dropped: its values reach nobody else, and leaving it out
would be one more case.

    request            a         b            c
    token_ids     a7 a8 a9      b4       c0 c1 c2 c3          T = 8
    query_start_loc  0           3          4          8
    seq_lens        10           5          4
    sampled_tokens        2      3          (7, if c has 4 tokens)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.worker.request_states import RequestStates


class InputBatch(NamedTuple):
    """Inputs of one step; R requests, T tokens, S sampled requests. The fields of the attention are those of its op.

    Attributes:
        rows: int64 [R], of the requests.
        num_scheduled_tokens: int64 [R].
        token_ids, positions, slot_mapping: int64 [T].
        query_start_loc: int32 [R + 1].
        seq_lens: int32 [R].
        block_tables: int32 [R, max_blocks].
        sampled_requests: int64 [S], indices among the R.
        sampled_tokens: int64 [S], the last token of each sampled request, index among the T.
    """

    rows: np.ndarray
    num_scheduled_tokens: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    sampled_requests: np.ndarray
    sampled_tokens: np.ndarray


def _check(states: RequestStates, rows: np.ndarray, num_scheduled: np.ndarray, block_size: int) -> None:
    """Raise ValueError when a step asks for tokens that are not known or for slots that the request does not hold."""
    seq_lens, num_tokens = states.num_computed_tokens[rows] + num_scheduled, states.num_tokens[rows]
    is_wrong = (num_scheduled < 1) | (seq_lens > num_tokens) | (seq_lens > states.num_blocks[rows] * block_size)
    is_wrong |= states.is_steady[rows] & (seq_lens != num_tokens)
    if is_wrong.any():
        index = int(is_wrong.argmax())
        row = rows[index]
        kind = "steady request" if states.is_steady[row] else "request"
        raise ValueError(
            f"{kind} {states.request_ids[row]}: step reaches token {seq_lens[index]} with {num_scheduled[index]}, "
            f"but there are {num_tokens[index]} tokens and {states.num_blocks[row]} blocks of {block_size}"
        )


def _batch_order(states: RequestStates, num_scheduled_tokens: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 [R] rows and int64 [R] tokens to compute; ValueError for a steady request that is named as well."""
    named = np.array([states.rows[request_id] for request_id in num_scheduled_tokens], np.int64)
    if states.is_steady[named].any():
        name = next(name for name in num_scheduled_tokens if states.is_steady[states.rows[name]])
        raise ValueError(f"request {name} is steady, and scheduled by name as well")
    num_tokens = np.ones(len(states.steady_rows) + len(named), np.int64)
    num_tokens[len(states.steady_rows) :] = list(num_scheduled_tokens.values())
    return np.concatenate((states.steady_rows, named)), num_tokens


def make_input_batch(states: RequestStates, num_scheduled_tokens: dict[str, int], block_size: int) -> InputBatch | None:
    """Return the step's inputs, or None when there is nothing to compute.

    Raises KeyError for a request without a row, ValueError for a step that reaches past a request's tokens or blocks,
    or that does not suit a steady request.
    """
    rows, num_tokens = _batch_order(states, num_scheduled_tokens)
    if len(rows) == 0:
        return None
    _check(states, rows, num_tokens, block_size)
    starts = states.num_computed_tokens[rows]
    seq_lens = starts + num_tokens

    query_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(num_tokens, out=query_start_loc[1:])
    row_of_token = np.repeat(rows, num_tokens)
    positions = np.arange(len(row_of_token)) + np.repeat(starts - query_start_loc[:-1], num_tokens)
    max_blocks = -(-int(seq_lens.max()) // block_size)
    blocks = states.block_tables[row_of_token, positions // block_size].astype(np.int64)
    sampled_requests = np.flatnonzero(seq_lens == states.num_tokens[rows])
    return InputBatch(
        rows=rows,
        num_scheduled_tokens=num_tokens,
        token_ids=states.token_ids[row_of_token, positions],
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens.astype(np.int32),
        block_tables=states.block_tables[rows, :max_blocks],
        sampled_requests=sampled_requests,
        sampled_tokens=query_start_loc[1:][sampled_requests].astype(np.int64) - 1,
    )
