"""Models that think and call nothing: a thought at the start of the output, then content.

A thought's opening marker counts only before everything else: in the middle of an answer it is text about thoughts. A
closing marker counts only in a thought.
"""

from __future__ import annotations

from octavo.api_server.parsers.base import Parser, ParserSpec
from octavo.api_server.parsers.pull import PullParser, Reads


class ThinkParser(PullParser):
    """A thought between `<think>` and `</think>`, then content."""

    def output(self) -> Reads[None]:
        yield from self.first_thought()
        yield from self.pour(self.say)


def make_parser(spec: ParserSpec) -> Parser:
    return ThinkParser(spec)
