"""What OpenAI's streams carry, as much of it as our clients read; whatever else a server sends is ignored."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_LINE_BYTES = 2**20
DONE = b"[DONE]"


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class Delta(msgspec.Struct):
    """Thoughts come under either of two names, or under both."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """A choice of either endpoint: completions have `text`, chats have `delta`."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        return self.text or (self.delta.content if self.delta else None) or ""

    @property
    def thought(self) -> str:
        return (self.delta.reasoning_content or self.delta.reasoning if self.delta else None) or ""


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


decode_event = msgspec.json.Decoder(Event).decode


def data_of(line: bytes) -> bytes | None:
    """Return the data that a line of a stream carries; None for comments, names of events and empty lines."""
    return line[len(b"data:") :].strip() if line.startswith(b"data:") else None


def error_text(error: Any) -> str:
    """Return what an error of a body or an event says, whatever its shape."""
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else str(error)
