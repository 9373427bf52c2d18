"""Calls as Mistral's models write them, in all versions of the format.

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]     v2, v3, v7
    [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}                      v11, v13

Nothing closes a call but the end of its JSON. The id is the model's own; clients get ours. A thought is what stands
between `[THINK]` and `[/THINK]`, or between `<think>` and `</think>` in the first models that had one.
"""

from __future__ import annotations

from octavo.api_server.parsers.base import Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.json_scan import arguments_text, is_tool_name, read_call
from octavo.api_server.parsers.pull import PullParser, Reads

CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
THOUGHTS = {"[THINK]": "[/THINK]", "<think>": "</think>"}
NAME_ENDS = (ARGUMENTS, CALL_ID, CALLS, "{", " ", "\n")


class MistralParser(PullParser):
    """A thought, then content and calls."""

    def output(self) -> Reads[None]:
        yield from self._thought()
        while marker := (yield from self.pour(self.say, *self.if_offered(CALLS))):
            self.begin_raw(marker)
            yield from self.blanks()
            first = yield from self.peek()
            if first == "[":
                yield from self._list()
            elif first == "{":
                call = yield from self._object()
                self.report(call)
            else:
                call = yield from self._named()
                self.report(call)

    def _thought(self) -> Reads[None]:
        blanks = yield from self.blanks()
        opener = (yield from self.take(*THOUGHTS)) if self.spec.has_reasoning else ""
        if self.starts_in_thought and not opener:
            prompt = self.spec.ends_generation_prompt.rstrip()
            opener = next((each for each in THOUGHTS if prompt.endswith(each)), "[THINK]")
        if not opener:
            self.say(blanks)
        elif (yield from self.pour(self.think, THOUGHTS[opener])):
            self.end_thought()

    def _list(self) -> Reads[None]:
        """Read a list of objects. Each is reported when it is complete, so those before a cut stay."""
        yield from self.take("[")
        separator = ","
        while separator == ",":
            yield from self.blanks()
            if (yield from self.take("]")):
                return
            call = yield from self._object()
            self.report(call)
            if call is None:
                return
            self.begin_raw("")
            yield from self.blanks()
            separator = yield from self.take(",", "]")
        if not separator:
            self.report(None)

    def _object(self) -> Reads[ToolCall | None]:
        text = yield from self.json_value()
        call = read_call(text) if text is not None else None
        return ToolCall(*call) if call is not None else None

    def _named(self) -> Reads[ToolCall | None]:
        name, marker = yield from self.until(*NAME_ENDS)
        if marker == CALL_ID:
            _, marker = yield from self.until(*NAME_ENDS)
        if not is_tool_name(name) or marker not in (ARGUMENTS, "{"):
            self.put_back()
            return None
        if marker == "{":
            self.put_back()
        arguments = yield from self._arguments()
        return ToolCall(name, arguments) if arguments is not None else None

    def _arguments(self) -> Reads[str | None]:
        """Read an object; nothing stands for it where the next call or the end of the output follows."""
        yield from self.blanks()
        if (yield from self.peek()) == "{":
            text = yield from self.json_value()
            return arguments_text(text) if text is not None else None
        has_next = yield from self.take(CALLS)
        self.put_back()
        return "{}" if has_next or (self.is_over and not self.is_cut and not self._text) else None


def make_parser(spec: ParserSpec) -> Parser:
    return MistralParser(spec)
