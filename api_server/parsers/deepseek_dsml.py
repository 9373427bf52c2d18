"""DeepSeek V3.2 and later: calls in DSML, markup whose values are not escaped.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_time">
    <｜DSML｜parameter name="zone" string="true">UTC</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

A value is text with `string="true"` and JSON with `string="false"`. V4 calls the section `tool_calls`, V4.1 ` calls`,
with a space before the other names too. All are read, whichever the model is.
"""

from __future__ import annotations

from octavo.api_server.parsers.base import Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.call_sections import SectionParser
from octavo.api_server.parsers.json_scan import is_tool_name
from octavo.api_server.parsers.markup import attributes, member, object_of
from octavo.api_server.parsers.pull import Reads

SECTION_NAMES = ("function_calls", "tool_calls", " calls")
INVOKES = ("<｜DSML｜invoke", "<｜DSML｜ invoke")
INVOKE_ENDS = ("</｜DSML｜invoke>", "</｜DSML｜ invoke>")
PARAMETERS = ("<｜DSML｜parameter", "<｜DSML｜ parameter")
PARAMETER_ENDS = ("</｜DSML｜parameter>", "</｜DSML｜ parameter>")
HEAD_END, CLOSED = '">', "/>"
IS_STRING = {"true": True, "false": False}


class DsmlParser(SectionParser):
    section_begins = tuple(f"<｜DSML｜{name}>" for name in SECTION_NAMES)
    section_ends = tuple(f"</｜DSML｜{name}>" for name in SECTION_NAMES)
    call_begins = INVOKES
    call_ends = INVOKE_ENDS

    def body(self) -> Reads[ToolCall | None]:
        head, marker = yield from self.until(CLOSED, HEAD_END, *INVOKE_ENDS)
        found = attributes(head + '"' if marker == HEAD_END else head)
        if marker not in (CLOSED, HEAD_END) or found is None or not is_tool_name(found.get("name")):
            self.put_back()
            return None
        arguments = "{}" if marker == CLOSED else (yield from self.parameters(found["name"]))
        return None if arguments is None else ToolCall(found["name"], arguments)

    def parameters(self, tool_name: str) -> Reads[str | None]:
        """Read the parameters of a call and the marker that ends it; None if they are malformed."""
        members: dict[str, str] = {}
        schema = self.spec.schema_of(tool_name)
        while True:
            yield from self.blanks()
            marker = yield from self.take(*PARAMETERS, *INVOKE_ENDS)
            if marker not in PARAMETERS:
                return object_of(members.values()) if marker else None
            head, marker = yield from self.until(HEAD_END, *INVOKE_ENDS)
            found = attributes(head + '"')
            if marker != HEAD_END or found is None or "name" not in found or found["name"] in members:
                self.put_back()
                return None
            text, is_closed = yield from self.raw_value(PARAMETER_ENDS, (*PARAMETERS, *INVOKE_ENDS))
            if not is_closed:
                return None
            is_string = IS_STRING.get(found.get("string", ""))
            members[found["name"]] = member(found["name"], text, is_string, schema)


def make_parser(spec: ParserSpec) -> Parser:
    return DsmlParser(spec)
