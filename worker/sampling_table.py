"""What each row asks of the sampler, as one array per option, so that a step's options are read with one index.

Invariant: `assign` rewrites every option of a row. Rejected: a list of SamplingParams, because reading them took as
long for a thousand requests as a small model's step.
"""

from __future__ import annotations

import numpy as np

from octavo.protocol.sampling_params import SamplingParams


class SamplingTable:
    """The options of SamplingParams by row, in the dtypes of the ops that take them.

    Attributes:
        temperatures, min_ps: float32 [num_rows].
        top_ps: float64 [num_rows].
        top_ks, seeds, choice_indices, min_tokens, num_candidates: int64 [num_rows].
        stop_token_ids: per row.
    """

    def __init__(self, num_rows: int) -> None:
        self.temperatures = np.zeros(num_rows, np.float32)
        self.top_ks = np.zeros(num_rows, np.int64)
        self.top_ps = np.ones(num_rows, np.float64)
        self.min_ps = np.zeros(num_rows, np.float32)
        self.seeds = np.zeros(num_rows, np.int64)
        self.choice_indices = np.zeros(num_rows, np.int64)
        self.min_tokens = np.zeros(num_rows, np.int64)
        self.num_candidates = np.zeros(num_rows, np.int64)
        self.stop_token_ids: list[tuple[int, ...]] = [()] * num_rows

    def assign(self, row: int, params: SamplingParams) -> None:
        """Replace all options of `row`."""
        self.temperatures[row] = params.temperature
        self.top_ks[row] = params.top_k
        self.top_ps[row] = params.top_p
        self.min_ps[row] = params.min_p
        self.seeds[row] = params.seed
        self.choice_indices[row] = params.choice_index
        self.min_tokens[row] = params.min_tokens
        self.num_candidates[row] = params.num_candidates
        self.stop_token_ids[row] = params.stop_token_ids
