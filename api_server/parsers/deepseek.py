"""DeepSeek V3, R1 and V3.1: calls in a section of special tokens, arguments as JSON.

    <｜tool▁calls▁begin｜>
    <｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{"zone": "UTC"}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>

without the line breaks. V3 and R1 write `function` before the separator, then the name on a line of its own, and the
arguments as a fenced block. Both are read, whichever the model is. Later versions are in `deepseek_dsml`.
"""

from __future__ import annotations

from octavo.api_server.parsers.base import Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.call_sections import SectionParser
from octavo.api_server.parsers.json_scan import is_tool_name
from octavo.api_server.parsers.pull import Reads

SECTION_BEGIN, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
KIND, FENCE = "function", "```"


class DeepseekParser(SectionParser):
    section_begins = (SECTION_BEGIN,)
    section_ends = (SECTION_END,)
    call_begins = (CALL_BEGIN,)
    call_ends = (CALL_END,)

    def body(self) -> Reads[ToolCall | None]:
        yield from self.blanks()
        name = yield from self.word("<")
        yield from self.blanks()
        if not (yield from self.take(SEPARATOR)):
            return None
        yield from self.blanks()
        has_kind = name == KIND and (yield from self.peek()) not in ("{", "<")
        if has_kind:
            name = yield from self.word("`")
            yield from self.blanks()
            yield from self.take(FENCE + "json")
        arguments = yield from self.json_arguments()
        if has_kind:
            yield from self.blanks()
            yield from self.take(FENCE)
        if arguments is None or not (yield from self.is_closed()) or not is_tool_name(name):
            return None
        return ToolCall(name, arguments)


def make_parser(spec: ParserSpec) -> Parser:
    return DeepseekParser(spec)
