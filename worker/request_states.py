"""One persistent row per request: its token ids, block table, lengths and sampling options.

Rows live as long as a request holds device blocks, so that a step only needs to say what changed. The worker appends
each token that it samples, which is why the next step needs no round trip to the engine core. Invariants: row lengths
say what is valid, and nothing past them is read; `assign` rewrites every value that can be read, so that a row carries
nothing from one request to the next. All arrays are allocated once (their pages cost nothing until used), numpy because
the work on them is small and torch's calls are slower.
"""

from __future__ import annotations

import math

import numpy as np

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import NewRequest


class RequestStates:
    """Rows by request id.

    Attributes (arrays are indexed by row):
        rows: request_id -> row.
        token_ids: int64 [max_num_seqs, max_model_len + 1], prompt then output; one more than a request may have,
            because a step may be under way when the last one is sampled.
        block_tables: int32 [max_num_seqs, blocks of that many tokens].
        num_tokens, num_prompt_tokens, num_computed_tokens, num_blocks: int64 [max_num_seqs].
        has_failed: bool [max_num_seqs], requests that get no more tokens.
        sampling_params: per row.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_tokens = max_model_len + 1
        self.rows: dict[str, int] = {}
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.token_ids = np.zeros((max_num_seqs, max_tokens), np.int64)
        self.block_tables = np.zeros((max_num_seqs, math.ceil(max_tokens / block_size)), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.has_failed = np.zeros(max_num_seqs, np.bool_)
        self.sampling_params: list[SamplingParams | None] = [None] * max_num_seqs

    def drop(self, request_id: str) -> None:
        """Forget a request; an id without a row is ignored."""
        row = self.rows.pop(request_id, None)
        if row is not None:
            self.free_rows.append(row)

    def assign(self, request: NewRequest) -> None:
        """Give a request a row with all of its state; a row that it may still have is replaced."""
        self.drop(request.request_id)
        row = self.free_rows.pop()
        self.rows[request.request_id] = row
        token_ids = request.prompt_token_ids + request.output_token_ids
        self.token_ids[row, : len(token_ids)] = token_ids
        self.block_tables[row] = 0
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = len(request.prompt_token_ids)
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.num_blocks[row] = 0
        self.has_failed[row] = False
        self.sampling_params[row] = request.sampling_params
        self.append_blocks(request.request_id, request.block_ids)

    def append_blocks(self, request_id: str, block_ids: list[int]) -> None:
        row = self.rows[request_id]
        first = self.num_blocks[row]
        self.block_tables[row, first : first + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Append one sampled token to each of `rows`."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
