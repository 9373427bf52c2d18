"""One persistent row per request: its token ids, block table, lengths and sampling options; and who is steady.

Rows live as long as a request holds device blocks, so that a step only needs to say what changed. The worker appends
each token that it samples, which is why the next step needs no round trip to the engine core. Invariants: row lengths
say what is valid, and nothing past them is read; `assign` rewrites every value that can be read, so that a row carries
nothing from one request to the next; the steady rows are those that joined and did not leave, in the order of joining.
All arrays are allocated once (their pages cost nothing until used), numpy because the work on them is small and torch's
calls are slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from octavo.protocol.worker_messages import CachedRequest, NewRequest
from octavo.worker.sampling_table import SamplingTable


class RequestStates:
    """Rows by request id.

    Attributes (arrays are indexed by row):
        rows: request_id -> row.
        request_ids: row -> request_id, of rows in use.
        token_ids: int64 [max_num_seqs, max_model_len + 1], prompt then output; one more than a request may have,
            because a step may be under way when the last one is sampled.
        block_tables: int32 [max_num_seqs, blocks of that many tokens].
        num_tokens, num_prompt_tokens, num_computed_tokens, num_blocks: int64 [max_num_seqs].
        has_failed: bool [max_num_seqs], requests that get no more tokens.
        sampling: the sampling options.
        is_steady: bool [max_num_seqs].
        steady_rows: int64 [number of steady requests], their rows in the order in which they joined.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_tokens = max_model_len + 1
        self.rows: dict[str, int] = {}
        self.request_ids = [""] * max_num_seqs
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.token_ids = np.zeros((max_num_seqs, max_tokens), np.int64)
        self.block_tables = np.zeros((max_num_seqs, math.ceil(max_tokens / block_size)), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.has_failed = np.zeros(max_num_seqs, np.bool_)
        self.sampling = SamplingTable(max_num_seqs)
        self.is_steady = np.zeros(max_num_seqs, np.bool_)
        self.steady_rows = np.zeros(0, np.int64)

    def drop(self, request_id: str) -> None:
        """Forget a request; an id without a row is ignored. `update_steady` has to follow."""
        row = self.rows.pop(request_id, None)
        if row is not None:
            self.is_steady[row] = False
            self.free_rows.append(row)

    def assign(self, request: NewRequest) -> None:
        """Give a request a row with all of its state; a row that it may still have is replaced."""
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

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Append one sampled token to each of `rows`."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

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
