"""The bodies of POST /v1/chat/completions, requests and answers. See `common_schemas` for the rules."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo.api_server.conversation.tools import Mode, Tool, ToolChoice
from octavo.api_server.openai.common_schemas import GenerationFields, NumAlternatives, Positive, Response, Usage
from octavo.api_server.openai.logprobs import ChatLogprobs, PromptLogprobs

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = ""


class MessageToolCall(msgspec.Struct, kw_only=True):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumAlternatives | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: list[Tool] | None = None
    tool_choice: Mode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None


class ToolCallFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class ToolCallAnswer(msgspec.Struct, kw_only=True):
    """A call; `index` is its place among the calls of its choice, in chunks only."""

    index: int | UnsetType = UNSET
    id: str
    type: str = "function"
    function: ToolCallFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    """`reasoning` is the same text as `reasoning_content`: some clients read the one, some the other."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    annotations: list[Any] = []
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Response, kw_only=True, omit_defaults=True):
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Response, kw_only=True, omit_defaults=True):
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
