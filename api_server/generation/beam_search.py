"""Beam search in drafts: what goes with it and what it becomes for the engine core.

The fields mean what they mean in transformers' `generate`: `num_beams` sequences are kept, `n` of them are answered.
Invariant: a field that would have no effect is refused by name. Rejected: streams, because until the end every beam may
still be replaced; and stop strings, because beams are ranked where there is no text.
"""

from __future__ import annotations

from typing import Any

from octavo.api_server.errors import invalid_value, unsupported
from octavo.api_server.generation.job import Draft
from octavo.protocol.engine_messages import MAX_NUM_BEAMS, BeamSearchParams
from octavo.protocol.sampling_params import NO_LOGPROBS

NO_OPS: dict[str, tuple[float, ...]] = {  # a beam search scores the model's own distribution
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}


def check_beam_fields(draft: Draft, max_num_seqs: int) -> None:
    """Raise ApiError that names the first field that does not go with a search."""
    if draft.rendering.is_streamed:
        raise unsupported("stream", "is not possible with use_beam_search: the beams are known only at the end")
    if draft.stop:
        raise unsupported("stop", "strings are not supported with use_beam_search; use stop_token_ids")
    for name, no_ops in NO_OPS.items():
        value = getattr(draft.sampling, name)
        if value is not None and value not in no_ops:
            allowed = " or ".join(f"{each:g}" for each in no_ops)
            raise unsupported(name, f"must be absent or {allowed} with use_beam_search, which does not sample")
    for name, value in _without_no_op(draft).items():
        if value:
            raise unsupported(draft.param(name), "is not supported with use_beam_search")
    _check_width(draft, min(MAX_NUM_BEAMS, max_num_seqs))


def beam_search_params(draft: Draft) -> BeamSearchParams | None:
    """Return the search that a checked draft asks for."""
    fields = draft.beam_search
    if fields is None:
        return None
    return BeamSearchParams(draft.num_choices, draft.n, fields.length_penalty, fields.early_stopping)


def _without_no_op(draft: Draft) -> dict[str, Any]:
    """Return fields whose mere presence is refused."""
    sampling, rendering = draft.sampling, draft.rendering
    return {
        "logit_bias": sampling.logit_bias,
        "bad_words": sampling.bad_words,
        "allowed_token_ids": sampling.allowed_token_ids,
        "logprobs": rendering.num_logprobs != NO_LOGPROBS,
        "prompt_logprobs": rendering.num_prompt_logprobs != NO_LOGPROBS,
        "max_tokens": sampling.max_tokens == 0,
    }


def _check_width(draft: Draft, limit: int) -> None:
    width = draft.num_choices
    if width < draft.n:
        raise invalid_value("best_of", f"must be at least n, which is {draft.n}, got {width}")
    if width > limit:
        raise invalid_value(
            name_of_width(draft), f"asks for {width} beams, and this server searches with at most {limit}"
        )


def name_of_width(draft: Draft) -> str:
    """Return the field that says how many outputs of a prompt are computed."""
    return "n" if draft.beam_search is None or draft.beam_search.num_beams is None else "best_of"
