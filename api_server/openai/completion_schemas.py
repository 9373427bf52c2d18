"""The bodies of POST /v1/completions, requests and answers. See `common_schemas` for the rules."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.api_server.openai.common_schemas import (
    GenerationFields,
    Int64,
    Natural,
    NumAlternatives,
    Response,
    Usage,
)
from octavo.api_server.openai.logprobs import CompletionLogprobs, PromptLogprobs


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions. `max_tokens` 0 asks for the prompt alone."""

    prompt: str | list[str | Int64 | list[Int64]]
    max_tokens: Natural | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: NumAlternatives | None = None
    suffix: Any = None
    prompt_embeds: Any = None


class CompletionChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A choice of a whole completion, and of a chunk of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Response, kw_only=True, omit_defaults=True):
    """A whole completion, and a chunk of one."""

    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
