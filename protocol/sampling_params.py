"""How one request is sampled and when it ends.

Invariant: a `SamplingParams` that exists is valid; whoever receives one re-checks nothing. Checks that need the model
(context length, vocabulary) are made where the request is built, in `api_server.generation.gate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from octavo.protocol.grammar_limits import MAX_GRAMMAR_BYTES, MAX_NUM_GRAMMAR_START_TOKENS
from octavo.protocol.logprobs import MAX_NUM_LOGPROBS

MAX_SEED = 2**63 - 1
MAX_NUM_CANDIDATES = 2**16
MAX_NUM_BIASES = 1024
MAX_BIAS = 100.0
MAX_NUM_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 256
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # beyond, logits would leave the range of fp32
NO_LOGPROBS = -1
LOGPROBS_RULE = f"must be in [0, {MAX_NUM_LOGPROBS}]"


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Sampling options of one request; positional on the wire, so fields are appended with a default.

    Attributes:
        max_tokens: output tokens after which the request ends with FinishReason.LENGTH.
        min_tokens: output tokens before which neither EOS, nor a stop token, nor a stop string ends it.
        temperature: 0 is greedy (ties go to the lowest token id).
        top_k: sample among the k likeliest tokens; 0 is all.
        top_p: sample among the fewest likeliest tokens whose probabilities reach top_p.
        min_p: sample among tokens at least min_p times as likely as the likeliest.
        seed: key of the request's random numbers; always set, the API server draws one when the client gave none.
        choice_index: which of the n choices of one prompt this is; part of the random numbers' counter.
        stop_token_ids: ids that end the request like EOS does, whatever `ignore_eos` says.
        ignore_eos: go on after the model's EOS.
        num_candidates: instead of sampling, report so many of the likeliest tokens with their logprobs, and let the
            engine core say how the request goes on (beam search); 0 samples.
        repetition_penalty: divides logits above 0 and multiplies others, of tokens in the prompt or the output.
        presence_penalty: is taken off the logits of tokens in the output.
        frequency_penalty: times how often the output has a token, is taken off its logit.
        logit_bias: (token id, what is added to its logit), ascending by id, each id once.
        bad_words: sequences of tokens that the output must not have; the last token of one is forbidden where the
            others stand before it.
        allowed_token_ids: ascending; empty allows all.
        num_logprobs: report the logprob of each output token and of so many of the likeliest; NO_LOGPROBS: of none.
        num_prompt_logprobs: the same for the prompt's tokens.
        grammar: text for llguidance (Lark, or its JSON form) that the output has to follow, up to its end and EOS; ""
            for none. With `min_tokens` or `ignore_eos` there is none.
        grammar_start_token_ids: the output is free up to the first of these tokens, and the grammar begins after it;
            empty: it begins at once.

    Logits change in this order: forbidden tokens (allowed_token_ids, bad_words, min_tokens), logit_bias, repetition,
    frequency and presence penalty, temperature; then min_p, top_k and top_p choose. Greedy takes the largest before the
    temperature.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice_index: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_candidates: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    num_logprobs: int = NO_LOGPROBS
    num_prompt_logprobs: int = NO_LOGPROBS
    grammar: str = ""
    grammar_start_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError whose text starts with the name of the first field that is out of range."""
        checks = (
            ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must be between 0 and max_tokens"),
            ("temperature", 0 <= self.temperature <= 1000 and math.isfinite(self.temperature), "must be in [0, 1000]"),
            ("top_k", 0 <= self.top_k < 2**31, "must be 0 (all) or a positive number of tokens"),
            ("top_p", 0 < self.top_p <= 1, "must be in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "must be in [0, 1]"),
            ("seed", 0 <= self.seed <= MAX_SEED, f"must be in [0, {MAX_SEED}]"),
            ("choice_index", 0 <= self.choice_index < 2**31, "must be a small non-negative number"),
            ("num_candidates", 0 <= self.num_candidates <= MAX_NUM_CANDIDATES, f"is at most {MAX_NUM_CANDIDATES}"),
            ("stop_token_ids", all(0 <= i < 2**31 for i in self.stop_token_ids), "must be token ids"),
            (
                "repetition_penalty",
                MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
                f"must be in [{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]",
            ),
            ("presence_penalty", abs(self.presence_penalty) <= MAX_PENALTY, f"must be in ±{MAX_PENALTY:g}"),
            ("frequency_penalty", abs(self.frequency_penalty) <= MAX_PENALTY, f"must be in ±{MAX_PENALTY:g}"),
            ("num_logprobs", NO_LOGPROBS <= self.num_logprobs <= MAX_NUM_LOGPROBS, LOGPROBS_RULE),
            ("num_prompt_logprobs", NO_LOGPROBS <= self.num_prompt_logprobs <= MAX_NUM_LOGPROBS, LOGPROBS_RULE),
        )
        for name, is_valid, rule in checks:
            if not is_valid:
                raise ValueError(f"{name} {rule}, got {getattr(self, name)!r}")
        if self.logit_bias or self.bad_words or self.allowed_token_ids:
            self._check_token_lists()
        if self.grammar or self.grammar_start_token_ids:
            self._check_grammar()

    def _check_token_lists(self) -> None:
        ids = [token_id for token_id, _ in self.logit_bias]
        if len(ids) > MAX_NUM_BIASES:
            raise ValueError(f"logit_bias has {len(ids)} entries, at most {MAX_NUM_BIASES}")
        if not _is_ascending(ids) or not all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias):
            raise ValueError(f"logit_bias must have ascending token ids and values in ±{MAX_BIAS:g}")
        if len(self.bad_words) > MAX_NUM_BAD_WORDS:
            raise ValueError(f"bad_words are {len(self.bad_words)} sequences of tokens, at most {MAX_NUM_BAD_WORDS}")
        if not all(1 <= len(word) <= MAX_BAD_WORD_TOKENS and min(word) >= 0 for word in self.bad_words):
            raise ValueError(f"bad_words must be of 1 to {MAX_BAD_WORD_TOKENS} tokens")
        if not _is_ascending(self.allowed_token_ids):
            raise ValueError("allowed_token_ids must be ascending token ids")

    def _check_grammar(self) -> None:
        num_bytes = len(self.grammar.encode())
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise ValueError(f"grammar has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES}")
        start_ids, most = self.grammar_start_token_ids, MAX_NUM_GRAMMAR_START_TOKENS
        if not self.grammar or len(start_ids) > most:
            raise ValueError(f"grammar_start_token_ids go with a grammar and are at most {most}")
        if not all(0 <= token_id < 2**31 for token_id in start_ids):
            raise ValueError("grammar_start_token_ids must be token ids")
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise ValueError(f"{name} does not go with a grammar, which alone says where the output ends")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _is_ascending(token_ids: Sequence[int]) -> bool:
    """Return whether each id is larger than the one before, from 0 on."""
    return all(before < after for before, after in pairwise((-1, *token_ids)))
