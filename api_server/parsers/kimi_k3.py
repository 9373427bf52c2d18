"""Kimi K3: the whole message is markup of control tokens, in elements for thought, response and calls.

    <|open|>response<|sep|>Hello<|close|>response<|sep|>
    <|open|>tools<|sep|><|open|>call tool="get_time" index="1"<|sep|>
    <|open|>argument key="zone" type="string"<|sep|>UTC<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>

without the line breaks. Values are not escaped: text when their type is `string`, otherwise JSON. The prompt opens the
first element.
"""

from __future__ import annotations

from octavo.api_server.parsers.base import Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.call_sections import SectionParser
from octavo.api_server.parsers.json_scan import is_tool_name
from octavo.api_server.parsers.markup import attributes, member, object_of, without_entities
from octavo.api_server.parsers.pull import Reads

THOUGHT_BEGIN, THOUGHT_END = "<|open|>think<|sep|>", "<|close|>think<|sep|>"
RESPONSE_BEGIN, RESPONSE_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
TOOLS_BEGIN, TOOLS_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
MESSAGE_END = "<|close|>message<|sep|>"
CALL_BEGIN, CALL_END = "<|open|>call ", "<|close|>call<|sep|>"
ARGUMENT_BEGIN, ARGUMENT_END = "<|open|>argument ", "<|close|>argument<|sep|>"
HEAD_END = "<|sep|>"


class KimiK3Parser(SectionParser):
    section_begins = (TOOLS_BEGIN,)
    section_ends = (TOOLS_END,)
    call_begins = (CALL_BEGIN,)
    call_ends = (CALL_END,)

    def output(self) -> Reads[None]:
        tools = self.if_offered(TOOLS_BEGIN)
        thoughts = (THOUGHT_BEGIN, THOUGHT_END) if self.spec.has_reasoning else ()
        marker = THOUGHT_BEGIN if self.starts_in_thought else ""
        while True:
            if marker == THOUGHT_BEGIN:
                marker = yield from self.pour(self.think, THOUGHT_END, RESPONSE_BEGIN, *tools)
                if marker:
                    self.end_thought()
            elif marker == TOOLS_BEGIN:
                yield from self.section(marker)
                marker = ""
            else:
                marker = yield from self.pour(self.say, RESPONSE_BEGIN, RESPONSE_END, MESSAGE_END, *thoughts, *tools)
                if not marker:
                    return

    def body(self) -> Reads[ToolCall | None]:
        found = yield from self.head("tool")
        if found is None or not is_tool_name(found["tool"]):
            return None
        name, members = found["tool"], dict[str, str]()
        schema = self.spec.schema_of(name)
        while True:
            yield from self.blanks()
            marker = yield from self.take(ARGUMENT_BEGIN, CALL_END)
            if marker != ARGUMENT_BEGIN:
                return ToolCall(name, object_of(members.values())) if marker else None
            found = yield from self.head("key")
            if found is None or found["key"] in members:
                return None
            text, is_closed = yield from self.raw_value((ARGUMENT_END,), (ARGUMENT_BEGIN, CALL_END))
            if not is_closed:
                return None
            kind = found.get("type")
            is_string = None if kind is None else kind == "string"
            members[found["key"]] = member(found["key"], text, is_string, schema)

    def head(self, required: str) -> Reads[dict[str, str] | None]:
        """Read the attributes of an element and the end of its head; None if they are malformed or `required` lacks."""
        text, marker = yield from self.until(HEAD_END)
        found = attributes(text) if marker else None
        if found is None or required not in found:
            return None
        return {name: without_entities(value) for name, value in found.items()}


def make_parser(spec: ParserSpec) -> Parser:
    return KimiK3Parser(spec)
