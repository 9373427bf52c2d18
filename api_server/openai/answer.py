"""What differs between the generation endpoints: the shape of what they answer. All else is `generation`'s."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from octavo.api_server.openai.schemas import ChatChunk, Completion, Response, Usage

Chunk = ChatChunk | Completion


class FinishedChoice(msgspec.Struct):
    """A choice of an answer that is not streamed."""

    text: str
    finish_reason: str
    stop_reason: str | int | None


class Envelope(msgspec.Struct, frozen=True):
    """What all bodies of one answer have in common; `usage` is what chunks say before the usage is known."""

    id: str
    created: int
    model: str
    usage: UnsetType | None

    @classmethod
    def create(cls, id_prefix: str, model: str, has_usage: bool) -> Envelope:
        return cls(id_prefix + secrets.token_hex(16), int(time.time()), model, None if has_usage else UNSET)

    def fields(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


class Answer(Protocol):
    """The answer to one HTTP request."""

    def opening_chunk(self, index: int) -> Chunk | None:
        """Return the chunk that comes before the first text of choice `index`."""

    def text_chunk(self, index: int, text: str) -> Chunk: ...

    def finish_chunk(self, index: int, finish_reason: str, stop_reason: str | int | None) -> Chunk: ...

    def usage_chunk(self, usage: Usage) -> Chunk: ...

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Response: ...
