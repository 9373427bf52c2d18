"""Kimi K2: calls in a section of special tokens, the name of the tool in the id of the call, arguments as JSON.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{"zone": "UTC"}
    <|tool_call_end|><|tool_calls_section_end|>

without the line break. The model sometimes begins a section in the middle of a thought; that ends the thought. K3 has
another format, in `kimi_k3`.
"""

from __future__ import annotations

from octavo.api_server.parsers.base import Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.call_sections import SectionParser
from octavo.api_server.parsers.json_scan import is_tool_name
from octavo.api_server.parsers.pull import Reads

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
PREFIX = "functions."


class KimiParser(SectionParser):
    section_begins = (SECTION_BEGIN,)
    section_ends = (SECTION_END,)
    call_begins = (CALL_BEGIN,)
    call_ends = (CALL_END,)
    interrupts = (SECTION_BEGIN,)
    may_begin_with_noise = True

    def body(self) -> Reads[ToolCall | None]:
        yield from self.blanks()
        name = name_in((yield from self.word("<")))
        yield from self.blanks()
        if not (yield from self.take(ARGUMENTS_BEGIN)):
            return None
        arguments = yield from self.json_arguments()
        if arguments is None or not (yield from self.is_closed()) or not is_tool_name(name):
            return None
        return ToolCall(name, arguments)


def name_in(call_id: str) -> str:
    """Return the name of the tool in an id such as `functions.get_time:0`, of which either end may be missing."""
    name, colon, index = call_id.removeprefix(PREFIX).rpartition(":")
    return name if colon and index.isdecimal() else call_id.removeprefix(PREFIX)


def make_parser(spec: ParserSpec) -> Parser:
    return KimiParser(spec)
