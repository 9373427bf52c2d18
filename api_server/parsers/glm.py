"""GLM 4.5 and later: a call is a name and pairs of keys and values, none of them escaped.

    <tool_call>get_time<arg_key>zone</arg_key><arg_value>UTC</arg_value></tool_call>

White space may stand between the parts; inside a value it belongs to the value. Values have no types of their own: the
tool's schema says whether `3` is a number. A closing marker counts where the format goes on after it, so values may
speak of the format.
"""

from __future__ import annotations

from octavo.api_server.parsers.base import Parser, ParserSpec, ToolCall
from octavo.api_server.parsers.coerce import arguments_of
from octavo.api_server.parsers.json_scan import is_tool_name
from octavo.api_server.parsers.pull import PullParser, Reads

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
KEY_BEGIN, KEY_END = "<arg_key>", "</arg_key>"
VALUE_BEGIN, VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser(PullParser):
    def __init__(self, spec: ParserSpec) -> None:
        self._no_value_ends = False
        super().__init__(spec)

    def output(self) -> Reads[None]:
        yield from self.first_thought()
        while marker := (yield from self.pour(self.say, *self.if_offered(CALL_BEGIN))):
            self.begin_raw(marker)
            call = yield from self.body()
            self.report(call)

    def body(self) -> Reads[ToolCall | None]:
        """Read a call from after its first marker to after its last one; None if it is malformed."""
        yield from self.blanks()
        name, texts = (yield from self.word("<")), dict[str, str]()
        yield from self.blanks()
        marker = yield from self.take(KEY_BEGIN, CALL_END)
        if not is_tool_name(name):
            return None
        while marker == KEY_BEGIN:
            key, _ = yield from self.until(KEY_END, CALL_END)
            yield from self.blanks()
            key, is_opened = key.strip(), (yield from self.take(VALUE_BEGIN))
            text = (yield from self.value()) if is_opened and key and key not in texts else None
            if text is None:
                return None
            texts[key] = text
            yield from self.blanks()
            marker = yield from self.take(KEY_BEGIN, CALL_END)
        return ToolCall(name, arguments_of(texts, self.spec.schema_of(name))) if marker == CALL_END else None

    def value(self) -> Reads[str | None]:
        """Read a value and the marker that ends it; None if nothing does.

        Models forget the last `VALUE_END` of a call. That is known only when the output is over; then the value ends at
        the `CALL_END`, which is left.
        """
        if self._no_value_ends:
            text, marker = yield from self.until(CALL_END)
            self.put_back()
            return text if marker else None
        text, is_closed = yield from self.raw_value((VALUE_END,), (KEY_BEGIN, CALL_END))
        if is_closed:
            return text
        self._no_value_ends = True
        value, marker, rest = text.partition(CALL_END)
        if not marker or self.is_cut:
            return None
        self.unread(marker + rest)
        return value


def make_parser(spec: ParserSpec) -> Parser:
    return GlmParser(spec)
