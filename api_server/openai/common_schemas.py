"""What the bodies of OpenAI's generation endpoints have in common.

Requests: a field that is absent or null has its default; unknown fields are ignored. Fields that others know and that
would change the answer are declared, so that they can be refused by name. Ranges are part of the types, so the refusal
and the description of the API are one text. Responses: a field without a default is always there, null if it has no
value, because OpenAI's schema requires it; a field with a default is left out when it has no value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from octavo.protocol.engine_messages import MAX_LENGTH_PENALTY
from octavo.protocol.logprobs import MAX_NUM_LOGPROBS
from octavo.protocol.sampling_params import (
    MAX_BIAS,
    MAX_NUM_BIASES,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MIN_REPETITION_PENALTY,
)

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 64
MAX_ALLOWED_TOKEN_IDS = 2**20

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=1000)]
Probability = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
RepetitionPenalty = Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
LengthPenalty = Annotated[float, Meta(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)]
Bias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
ShortText = Annotated[str, Meta(min_length=1, max_length=256)]
Name128 = Annotated[str, Meta(max_length=128, pattern=r"^[ -~]*$(?!\n)")]  # printable ASCII
NumAlternatives = Annotated[int, Meta(ge=0, le=MAX_NUM_LOGPROBS)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What both generation endpoints take."""

    model: str
    max_tokens: Positive | None = None
    min_tokens: Natural | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-1, le=MAX_SEED)] | None = None
    n: Positive | None = None
    use_beam_search: bool | None = None
    best_of: Natural | None = None
    length_penalty: LengthPenalty | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: Int32 | None = None
    cache_salt: Name128 | None = None
    user: Name128 | None = None
    stop: ShortText | Annotated[list[ShortText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_NUM_BIASES)] | None = None
    bad_words: Annotated[list[ShortText], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    prompt_logprobs: NumAlternatives | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None
    store: Any = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Response(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of whole answers and of chunks.

    Their `usage` is UNSET where it has no place, None where it comes later.
    """

    id: str
    object: str
    created: int
    model: str
