"""How one request is sampled and when it ends.

Invariant: a `SamplingParams` that exists is valid; whoever receives one re-checks nothing. Checks that need the model
(context length, vocabulary) are made where the request is built, in `api_server.generation.gate`.
"""

from __future__ import annotations

import math

import msgspec

MAX_SEED = 2**63 - 1
MAX_NUM_CANDIDATES = 2**16


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
        )
        for name, is_valid, rule in checks:
            if not is_valid:
                raise ValueError(f"{name} {rule}, got {getattr(self, name)!r}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0
