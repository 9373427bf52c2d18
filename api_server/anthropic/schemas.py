"""Request bodies of POST /v1/messages and POST /v1/messages/count_tokens.

A field that is absent or null has its default; unknown fields are ignored. Blocks are one struct, whatever their
`type`, so that an unknown one is refused by its place; `input` checks what each type needs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.api_server.openai.common_schemas import MAX_STOP_STRINGS, Name128, Positive, Probability, ShortText


class InputBlock(msgspec.Struct, kw_only=True):
    """Part of a message, of the system's words, or of a tool's result.

    Attributes:
        type: text, thinking, redacted_thinking, tool_use or tool_result.
        id, name, input: of a tool_use: the call, what it calls, and its arguments.
        tool_use_id: of a tool_result: the call that it answers.
        content: of a tool_result: text, or text blocks.
        thinking: of a thinking: its text.
    """

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputBlock] | None = None
    thinking: str | None = None


class InputMessage(msgspec.Struct, kw_only=True):
    """One of `messages`."""

    role: Literal["user", "assistant"]
    content: str | list[InputBlock]


class ToolDefinition(msgspec.Struct, kw_only=True):
    """One of `tools`.

    Attributes:
        type: custom, which is the default: this server has no tools of its own.
        input_schema: JSON schema of the arguments.
    """

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceObject(msgspec.Struct, kw_only=True):
    """`name` belongs to the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, kw_only=True):
    """Whether the model thinks first, if its chat template knows.

    Attributes:
        budget_tokens: must be less than max_tokens, and is ignored otherwise: thoughts count as output.
        display: summarized, and nothing else; thoughts are shown as they are.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None
    display: str | None = None


class RequestMetadata(msgspec.Struct, kw_only=True):
    """Checked and ignored."""

    user_id: Annotated[str, Meta(max_length=512)] | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens.

    Attributes:
        messages: the conversation, oldest message first; a last message of the assistant is gone on with.
        system: what the system says before that: text, or text blocks.
        tool_choice: whether the model may, must, or which it must call.
        thinking: whether the model thinks first.
    """

    model: str
    messages: list[InputMessage]
    system: str | list[InputBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceObject | None = None
    thinking: ThinkingOptions | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages.

    Attributes:
        messages: the conversation, oldest message first; a last message of the assistant is gone on with.
        system: what the system says before that: text, or text blocks.
        tool_choice: whether the model may, must, or which it must call.
        thinking: whether the model thinks first.
        temperature: 0 is greedy; 1 is the most of this API.
        top_k: sample among so many of the likeliest tokens; 0 is all.
        stop_sequences: the text ends before the first of these that is complete.
        metadata, service_tier, inference_geo: checked and ignored.
    """

    max_tokens: Positive
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: Annotated[list[ShortText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Name128 | None = None
    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    output_config: Any = None
    output_format: Any = None
