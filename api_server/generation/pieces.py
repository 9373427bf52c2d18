"""Output one kind at a time: what answers that consist of separate blocks are built from."""

from __future__ import annotations

from octavo.api_server.generation.job import OutputEvent
from octavo.api_server.parsers.base import Content, Event, Reasoning


def pieces_of(output: OutputEvent) -> list[Event]:
    """Return what `output` has, without empty texts."""
    texts = (Reasoning(output.reasoning), Content(output.content))
    return [*(each for each in texts if each.text), *output.tool_calls]
