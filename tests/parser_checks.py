"""What tests of parsers share: tools, an output parsed in every way of cutting it up, what all formats must hold."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from octavo.api_server.conversation.tools import FunctionSpec, Tool
from octavo.api_server.parsers.base import (
    Content,
    Event,
    MarkerScanner,
    ParserSpec,
    Reasoning,
    Scan,
    ToolCall,
    join_events,
)
from octavo.api_server.parsers.json_scan import JsonScanner
from octavo.api_server.parsers.pull import PullParser, Reads
from octavo.api_server.parsers.selection import make_parser

NUM_DAMAGED = 60
DAMAGE = ('"', "}", "\\", " x")


def _tool(name: str, **properties: dict[str, Any]) -> Tool:
    schema = {"type": "object", "properties": properties} if properties else None
    return Tool(function=FunctionSpec(name=name, parameters=schema))


STRING = {"type": "string"}
TOOLS = (
    _tool(
        "get_weather",
        city=STRING,
        days={"type": "integer"},
        unit={"enum": ["c", "f"]},
        options={"type": "object"},
        metric={"type": "boolean"},
    ),
    _tool("get_time"),
    _tool("write_file", path=STRING, text=STRING, content=STRING),
    _tool("search", query=STRING, filters={"type": "object"}),
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


def specs_of(family: str) -> tuple[ParserSpec, ParserSpec, ParserSpec]:
    """Specs with tools; with tools and an output that begins in a thought; without tools."""
    return (
        make_spec(family),
        make_spec(family, starts_in_reasoning=True),
        make_spec(family, tools=()),
    )


class Output(NamedTuple):
    """All that an output comes to. A call is its name and its decoded arguments."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


def output_of(events: Sequence[Event]) -> Output:
    return Output(content_of(events), reasoning_of(events), tuple(calls_of(events)))


def read(spec: ParserSpec, text: str, is_cut: bool = False) -> Output:
    return output_of(parse(spec, [text], is_cut))


def check_output(spec: ParserSpec, text: str, expected: Output, markers: Sequence[str]) -> None:
    """The text comes to `expected` however it is split, and cut off anywhere to a beginning of that, but for space.

    Args:
        markers: what begins or ends something in the text. Half of one is text in an output that was cut.
    """
    assert output_of(parse_all_ways(spec, text)) == expected
    starts = {marker[:length] for marker in markers for length in range(len(marker))}
    for length in range(1, len(text)):
        _check_beginning(read(spec, text[:length], is_cut=True), expected, starts)


def _check_beginning(cut: Output, whole: Output, starts: Collection[str]) -> None:
    assert cut.calls == whole.calls[: len(cut.calls)]
    for part, full in ((cut.content, whole.content), (cut.reasoning, whole.reasoning)):
        lengths = [len(start) for start in starts if part.endswith(start)]
        beginnings = (part[: len(part) - length].strip() for length in lengths)
        assert any(full.strip().startswith(beginning) for beginning in beginnings), f"{part!r} of {full!r}"


def check_damaged(specs: Sequence[ParserSpec], texts: Sequence[str], markers: Sequence[str]) -> None:
    """Whatever became of some good texts: nothing raises, splits change nothing, arguments are objects."""
    drawing = random.Random(20)
    for _ in range(NUM_DAMAGED):
        parts = list(_parts(drawing.choice(texts), markers))
        for _ in range(drawing.randint(1, 3)):
            place = drawing.randrange(len(parts))
            parts[place : place + drawing.randint(0, 1)] = [drawing.choice([*markers, *parts, *DAMAGE])]
        text = "".join(parts)
        spec, is_cut = drawing.choice(specs), drawing.random() < 0.5
        whole = parse(spec, [text], is_cut)
        calls_of(whole)
        assert parse(spec, list(text), is_cut) == whole, text
        length = drawing.randrange(len(text) + 1)
        assert parse(spec, [text[:length], text[length:]], is_cut) == whole, text


def _parts(text: str, markers: Sequence[str]) -> Iterator[str]:
    """Cut a text into markers and runs of other text."""
    while text:
        places = [(text.find(marker), -len(marker), marker) for marker in markers if marker in text]
        place, _, marker = min(places, default=(len(text), 0, ""))
        yield from (part for part in (text[:place], marker) if part)
        text = text[place + len(marker) :]


def check_linear(spec: ParserSpec, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as many `unit`s are four times as much work: characters that scanners see, and readers that rest."""
    work = 0

    def push_marker(self: MarkerScanner, text: str) -> Scan:
        nonlocal work
        scan = scan_markers(self, text)
        work += len(text) - len(scan.rest)
        return scan

    def push_json(self: JsonScanner, text: str) -> int:
        nonlocal work
        num_taken = scan_json(self, text)
        work += num_taken
        return num_taken

    def has_text(self: PullParser) -> Reads[bool]:
        nonlocal work
        work += 1
        return wait_for_text(self)

    scan_markers, scan_json, wait_for_text = MarkerScanner.push, JsonScanner.push, PullParser.has_text
    amounts = []
    with monkeypatch.context() as patch:
        patch.setattr(MarkerScanner, "push", push_marker)
        patch.setattr(JsonScanner, "push", push_json)
        patch.setattr(PullParser, "has_text", has_text)
        for num_units in (20, 80):
            for pieces in ([unit * num_units], list(unit * num_units)):
                work = 0
                parse(spec, pieces)
                amounts.append(work)
    few_whole, few_single, many_whole, many_single = amounts
    assert many_whole < 4.5 * few_whole
    assert many_single < 4.5 * few_single


def as_json(**arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)
