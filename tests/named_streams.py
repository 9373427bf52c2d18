"""Streams whose events have names, and output that a parser takes apart, for the routes that answer in blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fake_engine import Script
from http_rig import EOS_ID, MODEL, Rig, says

from octavo.api_server.conversation.tools import FunctionSpec, Tool
from octavo.api_server.generation.gate import Gate
from octavo.api_server.generation.job import Job
from octavo.api_server.generation.parsing import Reading
from octavo.api_server.parsers.base import ParserSpec
from octavo.api_server.parsers.selection import make_parser
from octavo.protocol.engine_messages import AddRequest, ErrorCode, FinishReason

WEATHER = Tool(function=FunctionSpec(name="get_weather", parameters={"properties": {"city": {"type": "string"}}}))
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'

Scripts = Callable[[AddRequest], Script]
NamedEvent = tuple[str, Any]


def ends(text: str, reason: FinishReason = FinishReason.STOP, **options: Any) -> Scripts:
    """A script whose requests say `text` and end by themselves."""
    said = says(text)
    return lambda request: Script([*said(request).token_ids, EOS_ID], reason, **options)


def breaks(text: str) -> Scripts:
    """A script whose requests say `text` and fail then."""
    return ends(text, FinishReason.ERROR, error=ErrorCode.NUMERICAL_ERROR)


async def stream_named(rig: Rig, path: str, **fields: Any) -> list[NamedEvent]:
    """POST a streamed request; return the names and the data of its events."""
    async with rig.session.post(path, json={"model": MODEL, "stream": True, **fields}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return named_events((await response.read()).decode())


def named_events(text: str) -> list[NamedEvent]:
    events = []
    for each in text.split("\n\n"):
        if each and not each.startswith(":"):
            name, data = each.split("\n")
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
            assert name == f"event: {events[-1][1]['type']}"
    return events


def parse_as(monkeypatch: pytest.MonkeyPatch, family: str, *tools: Tool) -> None:
    """Have all output parsed as that of a model of `family` which may call `tools`."""
    prepare = Gate.prepare
    spec = ParserSpec(family, tools)

    async def prepare_with_parser(*arguments: Any) -> Job:
        return msgspec.structs.replace(await prepare(*arguments), reading=Reading(lambda: make_parser(spec)))

    monkeypatch.setattr(Gate, "prepare", prepare_with_parser)
