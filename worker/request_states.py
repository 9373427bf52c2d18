"""One persistent row per request: its token ids, block table, lengths and sampling options; and who is steady.

Rows live as long as a request holds device blocks, so that a step only needs to say what changed. The worker appends
each token that it samples, which is why the next step needs no round trip to the engine core. Between the start of a
step and its result the host does not know the token, but the device does: until then it is `-1 - row` here, which says
where the device finds it (`step_inputs.resolve_token_ids`).

Invariants: row lengths say what is valid, and nothing past them is read; `assign` rewrites every value that can be
read, so that a row carries nothing from one request to the next; no row is given away while a step that was started
before it was left has no result, so that a result can be written to its rows; the steady rows are those that joined and
did not leave, in the order of joining. All arrays are allocated once (their pages cost nothing until used), numpy
because the work on them is small and torch's calls are slower. Rejected: numbering the holders of a row to know stale
results (every access would have to compare).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from octavo.protocol.worker_messages import CachedRequest, NewRequest
from octavo.worker.sampling_table import SamplingTable


class RequestStates:
    """Rows by request id.

    Attributes (arrays are indexed by row):
        rows: request_id -> row.
        request_ids: row -> request_id, of rows in use.
        token_ids: int64 [num_rows, max_model_len + 1], prompt then output; one more than the context, because a step
            may be under way when the last one is sampled, and a prompt that fills the context has a token behind it.
        block_tables: int32 [num_rows, blocks of that many tokens].
        num_tokens, num_prompt_tokens, num_computed_tokens, num_blocks: int64 [num_rows].
        has_failed: bool [num_rows], requests that get no more tokens.
        sampling: the sampling options.
        is_steady: bool [num_rows].
        steady_rows: int64 [number of steady requests], their rows in the order in which they joined.
        num_requests, num_rows: how many may run, and rows that there are.
        left_rows: for each started step without a result, the rows that were left since.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_spare_rows: int = 0) -> None:
        """With two steps in flight, a step may come before the rows that it left are free: `num_spare_rows` then."""
        max_tokens, num_rows = max_model_len + 1, max_num_seqs + num_spare_rows
        self.num_requests = max_num_seqs
        self.num_rows = num_rows
        self.rows: dict[str, int] = {}
        self.request_ids = [""] * num_rows
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.left_rows: deque[list[int]] = deque()
        self.token_ids = np.zeros((num_rows, max_tokens), np.int64)
        self.block_tables = np.zeros((num_rows, math.ceil(max_tokens / block_size)), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)
        self.num_computed_tokens = np.zeros(num_rows, np.int64)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.has_failed = np.zeros(num_rows, np.bool_)
        self.sampling = SamplingTable(num_rows)
        self.is_steady = np.zeros(num_rows, np.bool_)
        self.steady_rows = np.zeros(0, np.int64)

    def begin_step(self) -> None:
        """From now on, until the `end_step` that answers this, rows that are left are not given away."""
        self.left_rows.append([])

    def end_step(self) -> None:
        """The oldest step that began has its result."""
        self.free_rows += self.left_rows.popleft()

    def drop(self, request_id: str) -> None:
        """Forget a request; an id without a row is ignored. `update_steady` has to follow."""
        row = self.rows.pop(request_id, None)
        if row is not None:
            self.is_steady[row] = False
            (self.left_rows[-1] if self.left_rows else self.free_rows).append(row)

    def assign(self, request: NewRequest) -> int:
        """Give a request a row with all of its state, and return it; a row that it may still have is replaced."""
        self.drop(request.request_id)
        row = self.free_rows.pop()
        self.rows[request.request_id] = row
        self.request_ids[row] = request.request_id
        self.num_prompt_tokens[row] = len(request.prompt_token_ids)
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.num_tokens[row] = self.num_blocks[row] = 0
        self.block_tables[row] = 0
        self.has_failed[row] = False
        self.sampling.assign(row, request.sampling_params)
        self._extend(row, request.block_ids, request.prompt_token_ids + request.output_token_ids)
        return row

    def grow(self, request: CachedRequest) -> None:
        """Append what a request got; ValueError for a token that it did not leave to the engine core."""
        row = self.rows[request.request_id]
        if request.new_token_ids and not self.sampling.num_candidates[row]:
            raise ValueError(f"request {request.request_id} gets a token, but samples its own")
        self._extend(row, request.new_block_ids, request.new_token_ids)

    def _extend(self, row: int, block_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        first_block, first_token = self.num_blocks[row], self.num_tokens[row]
        self.block_tables[row, first_block : first_block + len(block_ids)] = block_ids
        self.token_ids[row, first_token : first_token + len(token_ids)] = token_ids
        self.num_blocks[row] += len(block_ids)
        self.num_tokens[row] += len(token_ids)

    def expect_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Append to each of `rows` a token that the device will know; return int64 [len(rows)], their positions."""
        positions = self.num_tokens[rows]
        self.token_ids[rows, positions] = -1 - rows
        self.num_tokens[rows] += 1
        return positions

    def fill_tokens(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> None:
        """Write what the device has sampled to where it was expected."""
        self.token_ids[rows, positions] = token_ids

    def update_steady(self, left: Sequence[str], joined: Sequence[str]) -> None:
        """Take requests, and rows that are gone, out of the steady ones, then append those that join.

        Raises KeyError for a request without a row, ValueError for one that leaves or joins although it is not, or is,
        steady.
        """
        for request_id in left:
            if not self.is_steady[self.rows[request_id]]:
                raise ValueError(f"request {request_id} cannot leave the steady ones: it is not steady")
            self.is_steady[self.rows[request_id]] = False
        # Before anybody joins, because a row that was given away may come back with another request.
        self.steady_rows = self.steady_rows[self.is_steady[self.steady_rows]]
        for request_id in joined:
            if self.is_steady[self.rows[request_id]]:
                raise ValueError(f"request {request_id} cannot join the steady ones: it is steady")
            self.is_steady[self.rows[request_id]] = True
        if joined:
            rows = [self.rows[request_id] for request_id in joined]
            self.steady_rows = np.append(self.steady_rows, np.array(rows, np.int64))
