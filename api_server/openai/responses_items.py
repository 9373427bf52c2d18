"""Output to the items of a response and to the events that tell of them.

Whole answers and streams go through the same writer, so a response that was streamed ends as one that was not. Text of
one kind is one item with one part; what the model wrote after a call is an item of its own.
"""

from __future__ import annotations

import secrets

from octavo.api_server.generation.job import OutputEvent
from octavo.api_server.generation.pieces import pieces_of
from octavo.api_server.openai.logprobs import ChatTokenLogprob, chat_logprobs
from octavo.api_server.openai.responses_answer import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    ArgumentsDelta,
    ArgumentsDone,
    FunctionCallItem,
    Item,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseEvent,
)
from octavo.api_server.parsers.base import Content, Reasoning, ToolCall

Logprobs = list[ChatTokenLogprob]


class OpenItem:
    """An item of text that goes on. Parts and items in events are never changed afterwards."""

    id_prefix = ""

    def __init__(self, output_index: int) -> None:
        self.output_index = output_index
        self.id = self.id_prefix + secrets.token_hex(16)
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def opening(self) -> list[ResponseEvent]:
        return [
            ItemAdded(output_index=self.output_index, item=self.item(IN_PROGRESS, is_empty=True)),
            PartAdded(item_id=self.id, output_index=self.output_index, part=self.part("")),
        ]

    def closing(self, item: Item) -> list[ResponseEvent]:
        return [
            self.text_done(),
            PartDone(item_id=self.id, output_index=self.output_index, part=self.part(self.text)),
            ItemDone(output_index=self.output_index, item=item),
        ]

    def part(self, text: str) -> OutputText | ReasoningText:
        raise NotImplementedError

    def item(self, status: str, *, is_empty: bool = False) -> Item:
        raise NotImplementedError

    def text_done(self) -> ResponseEvent:
        raise NotImplementedError


class OpenMessage(OpenItem):
    """What the model says."""

    id_prefix = "msg_"

    def __init__(self, output_index: int) -> None:
        super().__init__(output_index)
        self.logprobs: Logprobs = []

    def add(self, text: str, logprobs: Logprobs) -> ResponseEvent:
        self.texts.append(text)
        self.logprobs += logprobs
        return OutputTextDelta(item_id=self.id, output_index=self.output_index, delta=text, logprobs=logprobs)

    def part(self, text: str) -> OutputText:
        return OutputText(text=text, logprobs=[*self.logprobs])

    def item(self, status: str, *, is_empty: bool = False) -> MessageItem:
        return MessageItem(id=self.id, status=status, content=[] if is_empty else [self.part(self.text)])

    def text_done(self) -> ResponseEvent:
        return OutputTextDone(
            item_id=self.id, output_index=self.output_index, text=self.text, logprobs=[*self.logprobs]
        )


class OpenReasoning(OpenItem):
    """What the model thinks."""

    id_prefix = "rs_"

    def add(self, text: str) -> ResponseEvent:
        self.texts.append(text)
        return ReasoningTextDelta(item_id=self.id, output_index=self.output_index, delta=text)

    def part(self, text: str) -> ReasoningText:
        return ReasoningText(text=text)

    def item(self, status: str, *, is_empty: bool = False) -> ReasoningItem:
        return ReasoningItem(id=self.id, status=status, content=[] if is_empty else [self.part(self.text)])

    def text_done(self) -> ResponseEvent:
        return ReasoningTextDone(item_id=self.id, output_index=self.output_index, text=self.text)


class ItemWriter:
    """The items of one answer.

    Attributes:
        items: those that are complete.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: OpenItem | None = None
        self._logprobs: Logprobs = []  # of content whose text has not come yet

    def add(self, output: OutputEvent) -> list[ResponseEvent]:
        """Take more output; return the events that tell of it."""
        self._logprobs += chat_logprobs(output.logprobs, shows_ids=False).content
        events: list[ResponseEvent] = []
        for piece in pieces_of(output):
            match piece:
                case Content(text):
                    events += self._say(text)
                case Reasoning(text):
                    self._logprobs = []  # only content has any here
                    events += self._think(text)
                case ToolCall():
                    self._logprobs = []
                    events += self._close(COMPLETED) + self._call(piece)
        return events

    def finish(self, *, is_cut: bool) -> list[ResponseEvent]:
        """End the answer, which has at least one item then; `is_cut`: for its length."""
        events: list[ResponseEvent] = []
        is_empty = self._open is None and not self.items
        if is_empty or (self._logprobs and isinstance(self._open, OpenMessage)):
            events = self._say("")
        return events + self._close(INCOMPLETE if is_cut else COMPLETED)

    def _say(self, text: str) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        if not isinstance(self._open, OpenMessage):
            events = self._close(COMPLETED)
            self._open = OpenMessage(len(self.items))
            events += self._open.opening()
        logprobs, self._logprobs = self._logprobs, []
        return [*events, self._open.add(text, logprobs)]

    def _think(self, text: str) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        if not isinstance(self._open, OpenReasoning):
            events = self._close(COMPLETED)
            self._open = OpenReasoning(len(self.items))
            events += self._open.opening()
        return [*events, self._open.add(text)]

    def _close(self, status: str) -> list[ResponseEvent]:
        if self._open is None:
            return []
        item, closed = self._open.item(status), self._open
        self.items.append(item)
        self._open = None
        return closed.closing(item)

    def _call(self, call: ToolCall) -> list[ResponseEvent]:
        index, item_id, call_id = len(self.items), "fc_" + secrets.token_hex(16), "call_" + secrets.token_hex(12)
        item = FunctionCallItem(id=item_id, status=COMPLETED, call_id=call_id, name=call.name, arguments=call.arguments)
        self.items.append(item)
        return [
            ItemAdded(output_index=index, item=FunctionCallItem(id=item_id, call_id=call_id, name=call.name)),
            ArgumentsDelta(item_id=item_id, output_index=index, delta=call.arguments),
            ArgumentsDone(item_id=item_id, output_index=index, name=call.name, arguments=call.arguments),
            ItemDone(output_index=index, item=item),
        ]
