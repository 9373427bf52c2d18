"""Server-sent events, or lines of JSON: the one writer of a streamed answer.

The response starts with the first bytes that are sent, so everything that is refused before has a status of its own.
Proxies cut silent connections, so a sign of life goes out after `KEEP_ALIVE_S` of silence. A client that does not read
for `STALL_S` is cut, which frees what its request holds. Both clocks cost nothing per token: one timer per stream looks
at the times of the last write. Rejected: a timeout around each write, which costs as much as the write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import msgspec
from aiohttp import web

KEEP_ALIVE_S = 15.0
STALL_S = 30.0
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"
PLACE = "\0"  # stands for the text in a template; no id or model name has it
ENCODED_PLACE = msgspec.json.encode(PLACE)

encode_json = msgspec.json.Encoder().encode


class Media(NamedTuple):
    """A kind of stream.

    Attributes:
        content_type: of the response.
        sign_of_life: bytes that clients ignore; empty where the kind has none.
        last_data: data of the last event where that is no JSON; empty: all are JSON.
    """

    content_type: str
    sign_of_life: bytes
    last_data: str = ""


SSE = Media("text/event-stream", b": keep-alive\n\n")
SSE_UNTIL_DONE = SSE._replace(last_data="[DONE]")
NDJSON = Media("application/x-ndjson", b"")  # clients parse every line, the empty one too


def event(content: msgspec.Struct, name: str = "") -> bytes:
    """Return the event that carries `content`, of the type `name` if that is not empty."""
    return event_of(encode_json(content), name)


def event_of(data: bytes, name: str = "") -> bytes:
    """Return the event that carries one line of `data`."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + data + b"\n\n"


def line_of(content: msgspec.Struct) -> bytes:
    """Return the line that carries `content` in a stream of JSON lines."""
    return encode_json(content) + b"\n"


class EventTemplate:
    """An event whose only variable part is one text: the rest is encoded once."""

    def __init__(self, content: msgspec.Struct, name: str = "") -> None:
        """`content` has PLACE where the text goes; `name` as in `event`."""
        self.head, _, self.tail = event(content, name).partition(ENCODED_PLACE)

    def fill(self, text: str) -> bytes:
        return self.head + encode_json(text) + self.tail


class SseWriter:
    """The stream of one HTTP request; a context manager that ends its timer."""

    def __init__(self, request: web.Request, on_silence: Callable[[], None], media: Media = SSE) -> None:
        """`on_silence` has the owner of the writer call `comment` soon."""
        self.request = request
        self.on_silence = on_silence
        self.media = media
        self.response = web.StreamResponse(headers={"Content-Type": f"{media.content_type}; charset=utf-8", **HEADERS})
        self._loop = asyncio.get_running_loop()
        self._last_write_s = self._loop.time()
        self._is_writing = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> SseWriter:
        self._set_timer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def has_started(self) -> bool:
        return self.response.prepared

    async def send(self, events: bytes) -> None:
        """Write whole events; waits while the client does not read. Raises ConnectionError when it has gone."""
        self._last_write_s = self._loop.time()
        self._is_writing = True
        if not self.response.prepared:
            await self.response.prepare(self.request)
        await self.response.write(events)
        self._is_writing = False
        self._last_write_s = self._loop.time()

    async def comment(self) -> None:
        """Send a sign of life that clients ignore, if the silence calls for one and there is one."""
        if self.media.sign_of_life and self._loop.time() - self._last_write_s >= KEEP_ALIVE_S:
            await self.send(self.media.sign_of_life)

    async def end(self) -> web.StreamResponse:
        self._is_writing = True
        self._last_write_s = self._loop.time()
        await self.response.write_eof()
        return self.response

    def _set_timer(self) -> None:
        self._timer = self._loop.call_at(self._deadline_s(), self._look)

    def _deadline_s(self) -> float:
        return self._last_write_s + (STALL_S if self._is_writing else KEEP_ALIVE_S)

    def _look(self) -> None:
        now_s = self._loop.time()
        if now_s < self._deadline_s():
            self._set_timer()
        elif not self._is_writing:
            self.on_silence()
            self._timer = self._loop.call_later(KEEP_ALIVE_S, self._look)
        elif self.request.transport is not None:
            self.request.transport.abort()
