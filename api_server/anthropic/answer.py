"""The answer of POST /v1/messages: the message, its blocks, and the events that tell of them.

Anthropic's schema requires every field, null where it has no value. Structs are told apart by `type`, which is their
tag, and the tag of an event is its name in the stream as well.
"""

from __future__ import annotations

import msgspec


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str = ""
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought; nothing is signed, so nothing checks a signature either."""

    thinking: str = ""
    signature: str = ""


class DirectCaller(msgspec.Struct, frozen=True, tag_field="type", tag="direct"):
    """The model itself called."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call. `input` is a JSON object, in the model's own spelling."""

    id: str
    name: str
    input: msgspec.Raw
    caller: DirectCaller = DirectCaller()


Block = TextBlock | ThinkingBlock | ToolUseBlock


class DeltaUsage(msgspec.Struct, kw_only=True):
    """Tokens of a message. `input_tokens` are those whose KV was not cached."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: None = None
    server_tool_use: None = None


class MessageUsage(DeltaUsage, kw_only=True):
    cache_creation: None = None
    inference_geo: None = None
    service_tier: str = "standard"


class MessageAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """Answer of POST /v1/messages.

    Attributes:
        stop_reason: end_turn, max_tokens, stop_sequence or tool_use; null only in the first event of a stream.
        stop_sequence: which one it was.
    """

    id: str
    role: str = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: MessageUsage


class MessageEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    """Base of the events."""


class MessageStart(MessageEvent, kw_only=True, tag="message_start"):
    message: MessageAnswer


class Ping(MessageEvent, kw_only=True, tag="ping"):
    pass


class BlockStart(MessageEvent, kw_only=True, tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(MessageEvent, kw_only=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(MessageEvent, kw_only=True, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, kw_only=True):
    stop_reason: str
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class MessageDelta(MessageEvent, kw_only=True, tag="message_delta"):
    delta: StopDelta
    usage: DeltaUsage


class MessageStop(MessageEvent, kw_only=True, tag="message_stop"):
    pass


StreamEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class CountTokensAnswer(msgspec.Struct):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int
