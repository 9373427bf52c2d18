"""What each row asks of the sampler, as one array per option, so that a step's options are read with one index.

Options that few requests have, and that are lists, stand per row; `has_edits` says with one index that no row of a step
has any. Invariant: `assign` rewrites every option of a row. Rejected: a list of SamplingParams, because reading them
took as long for a thousand requests as a small model's step.
"""

from __future__ import annotations

import numpy as np

from octavo.protocol.sampling_params import NO_LOGPROBS, SamplingParams

BIAS_ENTRY = np.dtype([("token_id", np.int64), ("value", np.float32)])
NO_BIAS = np.zeros(0, BIAS_ENTRY)


class SamplingTable:
    """The options of SamplingParams by row, in the dtypes of the ops that take them.

    Attributes:
        temperatures, min_ps: float32 [num_rows].
        top_ps: float64 [num_rows].
        top_ks, seeds, choice_indices, min_tokens, num_candidates: int64 [num_rows].
        repetition_penalties, presence_penalties, frequency_penalties: float32 [num_rows].
        num_logprobs, num_prompt_logprobs: int64 [num_rows], NO_LOGPROBS for none.
        has_penalties: bool [num_rows].
        has_grammar: bool [num_rows].
        has_edits: bool [num_rows], whether a row changes its logits by penalties, a grammar, or one of the next three.
        logit_bias: per row, BIAS_ENTRY [num_biased].
        bad_words, allowed_token_ids, stop_token_ids, grammars, grammar_start_token_ids: per row.
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
        self.repetition_penalties = np.ones(num_rows, np.float32)
        self.presence_penalties = np.zeros(num_rows, np.float32)
        self.frequency_penalties = np.zeros(num_rows, np.float32)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS, np.int64)
        self.num_prompt_logprobs = np.full(num_rows, NO_LOGPROBS, np.int64)
        self.has_penalties = np.zeros(num_rows, np.bool_)
        self.has_grammar = np.zeros(num_rows, np.bool_)
        self.has_edits = np.zeros(num_rows, np.bool_)
        self.logit_bias = [NO_BIAS] * num_rows
        self.bad_words: list[tuple[tuple[int, ...], ...]] = [()] * num_rows
        self.allowed_token_ids: list[tuple[int, ...]] = [()] * num_rows
        self.stop_token_ids: list[tuple[int, ...]] = [()] * num_rows
        self.grammars = [""] * num_rows
        self.grammar_start_token_ids: list[tuple[int, ...]] = [()] * num_rows

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
        self.repetition_penalties[row] = params.repetition_penalty
        self.presence_penalties[row] = params.presence_penalty
        self.frequency_penalties[row] = params.frequency_penalty
        self.num_logprobs[row] = params.num_logprobs
        self.num_prompt_logprobs[row] = params.num_prompt_logprobs
        self.has_penalties[row] = params.has_penalties
        self.has_grammar[row] = bool(params.grammar)
        self.has_edits[row] = bool(
            params.has_penalties or params.logit_bias or params.bad_words or params.allowed_token_ids or params.grammar
        )
        self.logit_bias[row] = np.array(list(params.logit_bias), BIAS_ENTRY) if params.logit_bias else NO_BIAS
        self.bad_words[row] = params.bad_words
        self.allowed_token_ids[row] = params.allowed_token_ids
        self.stop_token_ids[row] = params.stop_token_ids
        self.grammars[row] = params.grammar
        self.grammar_start_token_ids[row] = params.grammar_start_token_ids
