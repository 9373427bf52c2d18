"""The bodies of OpenAI's API, as far as this server knows them.

Requests: a field that is absent or null has its default; unknown fields are ignored. Fields that others know and that
would change the answer are declared, so that they can be refused by name. Responses: a field without a default is
always there, null if it has no value, because OpenAI's schema requires it; a field with a default is left out when it
has no value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What both generation endpoints take."""

    model: str
    max_tokens: Int64 | None = None
    min_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    n: Int64 | None = None
    use_beam_search: bool | None = None
    best_of: Int64 | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None
    logprobs: Any = None
    echo: Any = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Int64 | None = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | Int64 | list[Int64]]
    add_special_tokens: bool | None = None
    suffix: Any = None
    prompt_embeds: Any = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Response(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of whole answers and of chunks.

    Their `usage` is UNSET where it has no place, None where it comes later.
    """

    id: str
    object: str
    created: int
    model: str


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    message: AssistantMessage
    logprobs: None
    finish_reason: str
    stop_reason: str | int | None = None


class ChatCompletion(Response, kw_only=True, omit_defaults=True):
    choices: list[ChatChoice]
    usage: Usage


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    delta: Delta
    finish_reason: str | None
    stop_reason: str | int | None = None


class ChatChunk(Response, kw_only=True, omit_defaults=True):
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A choice of a whole completion, and of a chunk of one."""

    index: int
    text: str
    logprobs: None
    finish_reason: str | None
    stop_reason: str | int | None = None


class Completion(Response, kw_only=True, omit_defaults=True):
    """A whole completion, and a chunk of one."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Model]
