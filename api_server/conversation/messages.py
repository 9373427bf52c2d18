"""Chat messages of the API to messages of a chat template.

Templates differ in what they take, so they get the least: text as one string, null as the empty one, and no key that
the client did not give. `developer` is OpenAI's newer name for `system`; templates know the latter.
"""

from __future__ import annotations

from typing import Any

from octavo.api_server.errors import invalid_value, unsupported
from octavo.api_server.openai.schemas import ChatMessage, ContentPart

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_MESSAGES = 2048
MAX_PARTS = 64
OPTIONAL_KEYS = ("name", "tool_calls", "tool_call_id")


def to_template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return what the template gets; raise ApiError that names the message."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid_value("messages", f"must have 1 to {MAX_MESSAGES} messages, has {len(messages)}")
    return [_to_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _to_template_message(message: ChatMessage, param: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid_value(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    result = {"role": ROLES[message.role], "content": _text(message.content, f"{param}.content")}
    for key in OPTIONAL_KEYS:
        if (value := getattr(message, key)) is not None:
            result[key] = value
    return result


def _text(content: str | list[ContentPart] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if len(content) > MAX_PARTS:
        raise invalid_value(param, f"has {len(content)} parts, at most {MAX_PARTS}")
    texts = []
    for index, part in enumerate(content):
        if part.type != "text":
            raise unsupported(f"{param}[{index}].type", "other than text is not supported: this server takes text only")
        if part.text is None:
            raise invalid_value(f"{param}[{index}].text", "is required in a text part")
        texts.append(part.text)
    return "\n".join(texts)
