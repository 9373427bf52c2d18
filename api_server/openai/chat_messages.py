"""The messages of a chat request to the internal form; every error names the message and the field."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.api_server.conversation.messages import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    Message,
    PastCall,
    check_number_of_messages,
    decode_arguments,
)
from octavo.api_server.errors import invalid_value, unsupported
from octavo.api_server.openai.chat_schemas import ChatMessage, ContentPart, MessageToolCall

# `developer` is OpenAI's newer name for `system`; templates know the latter.
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
MAX_PARTS = 64


def messages_of(messages: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Return the messages in the internal form; raises ApiError."""
    check_number_of_messages(len(messages), "messages")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: ChatMessage, param: str) -> Message:
    if message.role not in ROLES:
        raise invalid_value(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    return Message(
        role=ROLES[message.role],
        content=_text(message.content, f"{param}.content"),
        name=message.name,
        reasoning=message.reasoning_content if message.reasoning_content is not None else message.reasoning,
        tool_calls=tuple(
            _call(call, f"{param}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id,
    )


def _text(content: str | list[ContentPart] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if len(content) > MAX_PARTS:
        raise invalid_value(param, f"has {len(content)} parts, at most {MAX_PARTS}")
    return "\n".join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, param: str) -> str:
    if part.type not in ("text", "refusal"):
        raise unsupported(f"{param}.type", "other than text is not supported: this server takes text only")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise invalid_value(f"{param}.{part.type}", f"is required in a {part.type} part")
    return text


def _call(call: MessageToolCall, param: str) -> PastCall:
    arguments = decode_arguments(call.function.arguments, f"{param}.function.arguments")
    return PastCall(call.id, call.function.name, arguments)
