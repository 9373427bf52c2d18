"""The fields that OpenAI's generation endpoints share, as the parts of a draft."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.api_server.errors import invalid_value, unsupported
from octavo.api_server.generation.job import BeamFields, Counts, Rendering, SamplingFields
from octavo.api_server.openai.common_schemas import (
    CompletionTokensDetails,
    GenerationFields,
    PromptTokensDetails,
    Usage,
)
from octavo.protocol.engine_messages import EarlyStopping
from octavo.protocol.sampling_params import NO_LOGPROBS

EARLY_STOPPING = {True: EarlyStopping.ALWAYS, False: EarlyStopping.HEURISTIC, "never": EarlyStopping.NEVER}
BEAM_NO_OPS: dict[str, tuple[float | bool, ...]] = {"length_penalty": (1.0,), "early_stopping": (False,)}


def shared_parts(body: GenerationFields) -> dict[str, Any]:
    """Return the arguments of Draft that every endpoint takes from its body alike; raises ApiError."""
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options", "is allowed only with stream: true")
    return {
        "model": body.model,
        "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        "n": body.n or 1,
        "beam_search": _beam_fields(body),
        "priority": body.priority or 0,
        "cache_salt": body.cache_salt or "",
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
    }


def sampling_fields(body: GenerationFields, max_tokens: int | None) -> SamplingFields:
    return SamplingFields(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        bad_words=tuple(body.bad_words or ()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
    )


def rendering_of(body: GenerationFields, **own: Any) -> Rendering:
    """Return the rendering that `body` asks for; `own` are the fields that the endpoint reads in its own way."""
    return Rendering(
        is_streamed=bool(body.stream),
        num_prompt_logprobs=NO_LOGPROBS if body.prompt_logprobs is None else body.prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_string=bool(body.include_stop_str_in_output),
        **own,
    )


def usage_of(counts: Counts) -> Usage:
    reasoning = counts.num_reasoning_tokens
    return Usage(
        prompt_tokens=counts.num_prompt_tokens,
        completion_tokens=counts.num_output_tokens,
        total_tokens=counts.num_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.num_cached_tokens),
        completion_tokens_details=msgspec.UNSET if reasoning is None else CompletionTokensDetails(reasoning),
    )


def _beam_fields(body: GenerationFields) -> BeamFields | None:
    if not body.use_beam_search:
        for name, no_ops in BEAM_NO_OPS.items():
            _check_no_op(body, name, no_ops, "needs use_beam_search")
        _check_no_op(body, "best_of", (body.n or 1,), "other than n needs use_beam_search")
        return None
    return BeamFields(
        num_beams=body.best_of,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=EARLY_STOPPING[body.early_stopping or False],
    )


def _check_no_op(body: GenerationFields, name: str, no_ops: tuple[float | bool, ...], reason: str) -> None:
    value = getattr(body, name)
    if value is not None and value not in no_ops:
        raise unsupported(name, reason)
