"""Output to the content blocks of a message and to the events that tell of them.

Whole answers and streams go through the same writer, so the blocks of a stream, put together, are those of a message
that was not streamed. Text of one kind is one block; what the model wrote after a call is a block of its own.
"""

from __future__ import annotations

import secrets

import msgspec

from octavo.api_server.anthropic.answer import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from octavo.api_server.generation.job import OutputEvent
from octavo.api_server.generation.pieces import pieces_of
from octavo.api_server.parsers.base import Content, Reasoning, ToolCall

EMPTY_INPUT = msgspec.Raw(b"{}")


class BlockWriter:
    """The blocks of one message.

    Attributes:
        blocks: those that are complete.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._kind: type[TextBlock | ThinkingBlock] | None = None  # of the block that goes on
        self._texts: list[str] = []  # of that block

    def add(self, output: OutputEvent) -> list[MessageEvent]:
        """Take more output; return the events that tell of it."""
        events: list[MessageEvent] = []
        for piece in pieces_of(output):
            match piece:
                case Content(text):
                    events += self._continue(TextBlock, text)
                case Reasoning(text):
                    events += self._continue(ThinkingBlock, text)
                case ToolCall(name, arguments):
                    events += self._close() + self._call(name, arguments)
        return events

    def finish(self) -> list[MessageEvent]:
        """End the message, which has at least one block then."""
        is_empty = self._kind is None and not self.blocks
        return (self._open(TextBlock) if is_empty else []) + self._close()

    def _continue(self, kind: type[TextBlock | ThinkingBlock], text: str) -> list[MessageEvent]:
        events = [] if kind is self._kind else self._close() + self._open(kind)
        self._texts.append(text)
        delta = TextDelta(text) if kind is TextBlock else ThinkingDelta(text)
        return [*events, BlockDelta(index=len(self.blocks), delta=delta)]

    def _open(self, kind: type[TextBlock | ThinkingBlock]) -> list[MessageEvent]:
        self._kind, self._texts = kind, []
        return [BlockStart(index=len(self.blocks), content_block=kind())]

    def _close(self) -> list[MessageEvent]:
        if self._kind is None:
            return []
        text = "".join(self._texts)
        self.blocks.append(TextBlock(text=text) if self._kind is TextBlock else ThinkingBlock(thinking=text))
        self._kind = None
        return [BlockStop(index=len(self.blocks) - 1)]

    def _call(self, name: str, arguments: str) -> list[MessageEvent]:
        index, call_id = len(self.blocks), "toolu_" + secrets.token_hex(12)
        self.blocks.append(ToolUseBlock(id=call_id, name=name, input=msgspec.Raw(arguments.encode())))
        return [
            BlockStart(index=index, content_block=ToolUseBlock(id=call_id, name=name, input=EMPTY_INPUT)),
            BlockDelta(index=index, delta=InputDelta(arguments)),
            BlockStop(index=index),
        ]
