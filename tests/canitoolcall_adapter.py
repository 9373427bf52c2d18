"""canitoolcall's view of our parsers: its raw outputs go in as text, in the pieces that it chooses.

The tokenizers of its models are not at hand, so a unit is a marker of the family or else a single character.

    canitoolcall run --engine canitoolcall_adapter:OctavoAdapter --python .venv/bin/python --env PYTHONPATH=tests
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from canitoolcall.adapters.base import Adapter, ReplayInput, Support
from canitoolcall.fixtures import load_family
from canitoolcall.results import ParsedToolCall, ParseResult

from octavo.api_server.conversation.tools import Tool
from octavo.api_server.parsers.base import Content, Event, ParserSpec, Reasoning, ToolCall, join_events
from octavo.api_server.parsers.selection import make_parser, starts_in_reasoning

FAMILIES = {  # theirs -> ours, by the start of the model's name where it makes a difference
    "qwen3-hermes": {"": "hermes"},
    "qwen3-xml": {"": "qwen_xml"},
    "llama": {"meta-llama/Llama-3": "llama_json", "meta-llama/Llama-4": "pythonic"},
    "mistral": {"": "mistral"},
    "deepseek": {
        "deepseek-ai/DeepSeek-V3-": "deepseek",
        "deepseek-ai/DeepSeek-V3.1": "deepseek",
        "deepseek-ai/DeepSeek-V3.2": "deepseek_dsml",
        "deepseek-ai/DeepSeek-V4": "deepseek_dsml",
    },
    "glm": {"": "glm"},
    "kimi": {"moonshotai/Kimi-K2": "kimi", "moonshotai/Kimi-K3": "kimi_k3"},
    "gpt-oss": {"": "harmony"},
    "gemma4": {"": "gemma"},
}


def family_of(raw: ReplayInput) -> str:
    """Name of our family for a raw output of theirs."""
    return next(ours for start, ours in FAMILIES[raw.family].items() if raw.model.startswith(start))


class OctavoAdapter(Adapter):
    """Feeds raw outputs to the parser that `selection` has for their family."""

    name = "octavo"
    pinned_version = "0.1.0"

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []

    def version(self) -> str:
        return self.pinned_version

    def supports(self, family: str, model: str) -> Support:
        return Support(family in FAMILIES, None if family in FAMILIES else "no such format")

    def parser_config(self, raw: ReplayInput) -> dict[str, Any]:
        return {"family": family_of(raw)}

    def units(self, raw: ReplayInput) -> list[int]:
        markers = sorted(load_family(raw.family).markers, key=len, reverse=True)
        ids, position = [], 0
        while position < len(raw.text):
            piece = next((each for each in markers if raw.text.startswith(each, position)), raw.text[position])
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            ids.append(self._ids[piece])
            position += len(piece)
        return ids

    def special_token_ids(self, raw: ReplayInput) -> Collection[int]:
        return [number for piece, number in self._ids.items() if len(piece) > 1]

    def parse(self, raw: ReplayInput, tools: Sequence[Any]) -> ParseResult:
        return self._parse(raw, [raw.text], tools)

    def parse_stream(self, raw: ReplayInput, chunks: Sequence[Sequence[int]], tools: Sequence[Any]) -> ParseResult:
        return self._parse(raw, ["".join(self._pieces[each] for each in chunk) for chunk in chunks], tools)

    def parse_stream_text(self, raw: ReplayInput, deltas: Sequence[str], tools: Sequence[Any]) -> ParseResult:
        return self._parse(raw, deltas, tools)

    supports_text_deltas = True

    def _parse(self, raw: ReplayInput, pieces: Sequence[str], tools: Sequence[Any]) -> ParseResult:
        family, prompt = family_of(raw), raw.generation_prompt or ""
        spec = ParserSpec(
            family,
            tools=tuple(msgspec.convert(tool, Tool) for tool in tools),
            starts_in_reasoning=starts_in_reasoning(family, prompt),
            ends_generation_prompt=prompt,
        )
        parser = make_parser(spec)
        events: list[Event] = []
        for piece in pieces:
            events += parser.push(piece)
        return result_of([*events, *parser.finish(raw.truncated)])


def result_of(events: list[Event]) -> ParseResult:
    """Events in the form that canitoolcall compares."""
    joined = join_events(events)
    return ParseResult(
        "".join(event.text for event in joined if isinstance(event, Content)) or None,
        "".join(event.text for event in joined if isinstance(event, Reasoning)) or None,
        tuple(ParsedToolCall(event.name, event.arguments) for event in joined if isinstance(event, ToolCall)),
    )
