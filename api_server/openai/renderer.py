"""Output to the chunks of OpenAI's generation endpoints: what chat and completions have in common.

The two differ in the shape of their chunks, which is a `Shape`. Plain text, which is nearly all of a stream, fills a
template; everything else is encoded as a struct.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from octavo.api_server.errors import ApiError
from octavo.api_server.generation.job import Counts, OutputEvent, WholeChoice
from octavo.api_server.generation.run import Run
from octavo.api_server.http.sse import DONE, PLACE, EventTemplate, event, event_of
from octavo.api_server.openai.chat_schemas import ChatChunk
from octavo.api_server.openai.common_schemas import GenerationFields, Response, Usage
from octavo.api_server.openai.completion_schemas import Completion
from octavo.api_server.openai.fields import usage_of

Chunk = ChatChunk | Completion


class Envelope(msgspec.Struct, frozen=True):
    """What all bodies of one answer have in common; `usage` is what chunks say before the usage is known."""

    id: str
    created: int
    model: str
    usage: UnsetType | None

    @classmethod
    def create(cls, id_prefix: str, model: str, body: GenerationFields) -> Envelope:
        options = body.stream_options
        has_usage = options is not None and bool(options.include_usage)
        return cls(id_prefix + secrets.token_hex(16), int(time.time()), model, None if has_usage else UNSET)

    def fields(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}


class Shape(Protocol):
    """The shape of one endpoint's answer."""

    envelope: Envelope

    def opening_chunk(self, index: int) -> Chunk | None:
        """Return the chunk that comes before the first output of choice `index`."""

    def chunk(self, output: OutputEvent) -> Chunk:
        """Return the chunk of all that `output` has but its ending."""
        ...

    def finish_chunk(self, output: OutputEvent) -> Chunk:
        """Return the chunk that ends a choice, from the event with its ending."""
        ...

    def usage_chunk(self, usage: Usage) -> Chunk: ...

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Response: ...


class ChunkRenderer:
    """The renderer of both endpoints."""

    def __init__(self, shape: Shape, body: GenerationFields, run: Run) -> None:
        self.shape = shape
        self.run = run
        options = body.stream_options
        self.has_continuous_usage = options is not None and bool(options.continuous_usage_stats)
        self._templates = [
            EventTemplate(shape.chunk(OutputEvent(index, PLACE)))
            for index in range(run.job.num_choices if body.stream else 0)
        ]

    def whole(self, choices: Sequence[WholeChoice], counts: Counts) -> Response:
        return self.shape.whole(choices, usage_of(counts))

    def opening(self) -> bytes:
        chunks = [self.shape.opening_chunk(index) for index in range(len(self._templates))]
        return b"".join([self._event(chunk) for chunk in chunks if chunk is not None])

    def events(self, output: OutputEvent) -> bytes:
        if output.is_plain and not self.has_continuous_usage:
            return self._templates[output.index].fill(output.content)
        data = self._event(self.shape.chunk(output)) if output.has_output else b""
        return data if output.ending is None else data + self._event(self.shape.finish_chunk(output))

    def closing(self, counts: Counts) -> bytes:
        if self.shape.envelope.usage is UNSET:
            return DONE
        return event(self.shape.usage_chunk(usage_of(counts))) + DONE

    def failure(self, error: ApiError) -> bytes:
        return event_of(error.to_json())

    def _event(self, chunk: Chunk) -> bytes:
        if self.has_continuous_usage:
            chunk.usage = usage_of(self.run.counts())
        return event(chunk)
