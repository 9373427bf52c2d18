"""What each parser that reads its format from the front must hold: checks that a test calls with its examples."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from parser_checks import calls_of, content_of, make_spec, parse, parse_all_ways, reasoning_of

from octavo.api_server.conversation.tools import FunctionSpec, Tool
from octavo.api_server.parsers.base import Event, MarkerScanner, ParserSpec, Scan
from octavo.api_server.parsers.json_scan import JsonScanner
from octavo.api_server.parsers.pull import PullParser, Reads

NUM_DAMAGED = 60
DAMAGE = ('"', "}", "\\", " x")


def _tool(name: str, **properties: str) -> Tool:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return Tool(function=FunctionSpec(name=name, parameters=schema))


TOOLS = (
    _tool("get_weather", city="string", days="integer", metric="boolean"),
    _tool("write_file", path="string", content="string"),
    _tool("search", query="string", filters="object"),
    _tool("get_time"),
)


def specs_of(family: str) -> tuple[ParserSpec, ParserSpec, ParserSpec]:
    """Specs with tools; with tools and an output that begins in a thought; without tools."""
    return (
        make_spec(family, tools=TOOLS),
        make_spec(family, tools=TOOLS, starts_in_reasoning=True),
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
