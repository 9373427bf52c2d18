"""The one path of every endpoint that generates: admit, read, check, run, answer whole or as a stream.

An endpoint is a `Format`: how its body becomes a draft, and how output becomes its bytes. Invariant: errors before the
first byte of a stream have a status of their own; a later one is the stream's last event. A stream is written once per
update of the engine core, whatever the number of choices that it touches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from aiohttp import web

from octavo.api_server.api_keys import CALLER
from octavo.api_server.errors import ApiError, internal_error
from octavo.api_server.generation.job import Counts, Draft, OutputEvent, WholeChoice
from octavo.api_server.generation.run import Generator, Run
from octavo.api_server.health import ServerState, json_response
from octavo.api_server.http.body import read_body
from octavo.api_server.http.sse import SSE, Media, SseWriter

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)


class Renderer(Protocol):
    """The answer to one request in one format; made once its run is known."""

    def whole(self, choices: Sequence[WholeChoice], counts: Counts) -> msgspec.Struct:
        """Return the body of an answer that is not streamed."""
        ...

    def opening(self) -> bytes:
        """Return the events before the first output; may be empty."""
        ...

    def events(self, output: OutputEvent, /) -> bytes:
        """Return the ready bytes for more output; may be empty."""
        ...

    def closing(self, counts: Counts) -> bytes:
        """Return the last events of a stream that went well."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that broke."""
        ...


class Format(Protocol[Body]):
    """One endpoint's bodies, in both directions."""

    body_type: type[Body]

    def draft(self, body: Body) -> Draft:
        """Return what `body` asks for; pure. Raises ApiError for what does not go together in this API."""
        ...

    def renderer(self, body: Body, run: Run) -> Renderer: ...


class GenerationRoute(Generic[Body]):
    """Handler of one endpoint."""

    def __init__(self, form: Format[Body], generator: Generator, state: ServerState, media: Media = SSE) -> None:
        self.form = form
        self.media = media
        self.decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(form.body_type)
        self.generator = generator
        self.state = state

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a POST; raises ApiError while nothing has been sent."""
        self.state.check_accepting()
        arrival_time_s = time.monotonic()
        with self.generator.admit() as ticket:
            body = await read_body(request, self.decoder)
            job = await self.generator.prepare(self.form.draft(body), ticket, CALLER.get(), arrival_time_s)
            with self.generator.run(job, ticket) as run:
                renderer = self.form.renderer(body, run)
                if job.rendering.is_streamed:
                    return await _stream(SseWriter(request, run.wake, self.media), run, renderer)
                choices = await run.collect()
                return json_response(renderer.whole(choices, run.counts()))


async def _stream(writer: SseWriter, run: Run, renderer: Renderer) -> web.StreamResponse:
    with writer:
        try:
            await _send_all(writer, run, renderer)
        except ConnectionError:  # the client left; leaving the run aborts it
            return writer.response
        except Exception as problem:
            if not writer.has_started:
                raise
            if not isinstance(problem, ApiError):
                logger.exception("a stream failed")
            error = problem if isinstance(problem, ApiError) else internal_error()
            run.fail(error)
            await writer.send(renderer.failure(error))
        return await writer.end()


async def _send_all(writer: SseWriter, run: Run, renderer: Renderer) -> None:
    is_open = False
    while not run.is_finished:
        events = await run.events()
        if not events:
            await writer.comment()
            continue
        opening = b"" if is_open else renderer.opening()
        is_open = True
        if data := opening + b"".join([renderer.events(event) for event in events]):
            await writer.send(data)
    await writer.send(renderer.closing(run.counts()))
