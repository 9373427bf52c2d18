"""What a client says about sampling, completed with the model's defaults, to SamplingParams.

Ranges of single numbers are in the types of the request bodies and, as the last word, in SamplingParams. Here are the
checks that need the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from octavo.api_server.errors import ApiError, ErrorKind, invalid_value
from octavo.api_server.generation.job import Draft
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.config import DefaultSampling, ModelConfig
from octavo.protocol.sampling_params import NO_LOGPROBS, SamplingParams

COPIED_FIELDS = ("min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty")
DEFAULTED_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
NO_DEFAULTS = DefaultSampling()


class SamplingReader:
    """Reads the sampling fields of drafts, for one model."""

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer) -> None:
        self.defaults = model.default_sampling
        self.tokenizer = tokenizer
        self.vocab_size = model.vocab_size
        self.num_named_tokens = min(model.vocab_size, tokenizer.vocab_size)  # logits may be wider than the tokenizer

    def check(self, draft: Draft) -> None:
        """Raise ApiError that names the field if one speaks of a token that there is not."""
        fields = draft.sampling
        check_token_ids(draft.param("stop_token_ids"), fields.stop_token_ids, self.vocab_size)
        check_token_ids(draft.param("allowed_token_ids"), fields.allowed_token_ids or (), self.num_named_tokens)
        for name in fields.logit_bias or ():
            if not TOKEN_ID.fullmatch(name):
                raise invalid_value(draft.param("logit_bias"), "must have token ids as names, in decimal digits")
            check_token_ids(draft.param("logit_bias"), (int(name),), self.num_named_tokens)

    async def options(self, draft: Draft) -> dict[str, Any]:
        """Return the arguments of SamplingParams that are the same for all prompts of a checked draft."""
        fields, rendering = draft.sampling, draft.rendering
        defaults = self.defaults if draft.beam_search is None else NO_DEFAULTS
        options: dict[str, Any] = {name: getattr(fields, name) for name in COPIED_FIELDS}
        for name in DEFAULTED_FIELDS:
            value = getattr(fields, name)
            options[name] = getattr(defaults, name) if value is None else value
        options["top_k"] = 0 if options["top_k"] == -1 else options["top_k"]
        given = {name: value for name, value in options.items() if value is not None}
        bias = {int(name): value for name, value in (fields.logit_bias or {}).items()}
        return {
            **given,
            "stop_token_ids": fields.stop_token_ids,
            "logit_bias": tuple(sorted(bias.items())),
            "bad_words": await self._bad_words(fields.bad_words),
            "allowed_token_ids": tuple(sorted({*(fields.allowed_token_ids or ())})),
            "num_logprobs": NO_LOGPROBS if fields.max_tokens == 0 else rendering.num_logprobs,
            "num_prompt_logprobs": max(
                rendering.num_prompt_logprobs, rendering.num_logprobs if rendering.echo else NO_LOGPROBS
            ),
        }

    async def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, at the beginning of a text and behind a space."""
        spellings = [spelling for word in words for spelling in (word, f" {word}")]
        encoded = [await self.tokenizer.encode_off_loop(each, add_special_tokens=False) for each in spellings]
        return tuple(dict.fromkeys(map(tuple, encoded)))


def sampling_params_of(draft: Draft, max_tokens: int, seed: int, options: dict[str, Any]) -> SamplingParams:
    """Return the parameters of the first choice of a prompt; raises ApiError that names the field."""
    try:
        return SamplingParams(max_tokens, seed=seed, **options)
    except ValueError as problem:  # its text begins with the field's name, by contract
        name, _, rule = str(problem).partition(" ")
        param = draft.param(name)
        raise ApiError(ErrorKind.INVALID_VALUE, f"{param} {rule}", param) from None


def check_token_ids(param: str, token_ids: Sequence[int], limit: int) -> None:
    """Raise ApiError that names `param` unless all ids are in [0, limit)."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limit):
        raise invalid_value(param, f"must be token ids in [0, {limit})")
