"""What tests of parsers share: tools, and one output parsed in every way of cutting it up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from octavo.api_server.conversation.tools import FunctionSpec, Tool
from octavo.api_server.parsers.base import Content, Event, ParserSpec, Reasoning, ToolCall, join_events
from octavo.api_server.parsers.selection import make_parser

WEATHER_FIELDS = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "unit": {"enum": ["c", "f"]},
    "options": {"type": "object"},
}
TOOLS = (
    Tool(function=FunctionSpec(name="get_weather", parameters={"type": "object", "properties": WEATHER_FIELDS})),
    Tool(function=FunctionSpec(name="get_time")),
    Tool(
        function=FunctionSpec(
            name="write_file",
            parameters={"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        )
    ),
)


def make_spec(family: str, **options: Any) -> ParserSpec:
    """A spec that offers `TOOLS`, unless `options` say otherwise."""
    return ParserSpec(family, **{"tools": TOOLS, **options})


def parse(spec: ParserSpec, pieces: Iterable[str], is_cut: bool = False) -> list[Event]:
    """Parse an output that comes in `pieces`; check that no event is empty or could have been joined with another."""
    parser = make_parser(spec)
    events: list[Event] = []
    for batch in (*map(parser.push, pieces), parser.finish(is_cut)):
        assert batch == join_events(batch)
        events += batch
    return join_events(events)


def splits(text: str) -> Iterator[list[str]]:
    """Character by character, and every way to make two pieces."""
    yield list(text)
    for position in range(1, len(text)):
        yield [text[:position], text[position:]]


def parse_all_ways(spec: ParserSpec, text: str, is_cut: bool = False) -> list[Event]:
    """Parse `text` whole, and check that every split gives the same."""
    events = parse(spec, [text], is_cut)
    for pieces in splits(text):
        assert parse(spec, pieces, is_cut) == events, pieces
    return events


def content_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def reasoning_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def calls_of(events: Iterable[Event]) -> list[tuple[str, Any]]:
    """Names and decoded arguments of calls; checks that the arguments are an object."""
    calls = [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, ToolCall)]
    assert all(isinstance(arguments, dict) for _, arguments in calls)
    return calls
