"""The one path of both generation endpoints: admit, read, check, generate, answer.

Invariant: whatever ends the handler (an answer, an error, a client that left), the generation is left, so nothing runs
in the engine core for nobody. Errors before the first event have a status of their own; later ones are the last event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from octavo.api_server.admission import Admission
from octavo.api_server.api_keys import CALLER
from octavo.api_server.engine_client import EngineClient, Generation
from octavo.api_server.errors import ApiError, ErrorKind, internal_error
from octavo.api_server.generation.choices import Choices
from octavo.api_server.generation.gate import Gate
from octavo.api_server.generation.output_processor import TextDelta
from octavo.api_server.health import ServerState, json_response
from octavo.api_server.http.body import read_body
from octavo.api_server.http.sse import DONE, PLACE, EventTemplate, SseWriter, event, event_of
from octavo.api_server.openai.answer import Answer, Chunk, FinishedChoice
from octavo.api_server.openai.schemas import ChatRequest, CompletionRequest

logger = logging.getLogger(__name__)


class EventBuilder:
    """Deltas to events."""

    def __init__(self, answer: Answer, choices: Choices) -> None:
        self.answer = answer
        self.choices = choices
        self.has_continuous_usage = choices.submission.has_continuous_usage
        self._templates: dict[int, EventTemplate] = {}

    def events(self, index: int, delta: TextDelta) -> bytes:
        """Return the events of one delta; empty when its text is held back."""
        events = b""
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = EventTemplate(self.answer.text_chunk(index, PLACE))
            if (opening := self.answer.opening_chunk(index)) is not None:
                events = self._event(opening)
        if delta.text and self.has_continuous_usage:
            events += self._event(self.answer.text_chunk(index, delta.text))
        elif delta.text:
            events += template.fill(delta.text)
        if delta.finish_reason is not None:
            finish = self.answer.finish_chunk(index, delta.finish_reason.value, delta.stop_reason)
            events += self._event(finish)
        return events

    def last_events(self) -> bytes:
        if not self.choices.submission.has_usage:
            return DONE
        return event(self.answer.usage_chunk(self.choices.usage())) + DONE

    def _event(self, chunk: Chunk) -> bytes:
        if self.has_continuous_usage:
            chunk.usage = self.choices.usage()
        return event(chunk)


class GenerationRoute:
    """Handler of one generation endpoint."""

    def __init__(
        self,
        body_type: type[ChatRequest] | type[CompletionRequest],
        answer_type: Callable[[str, bool], Answer],
        state: ServerState,
        admission: Admission,
        processor: Gate,
        engine: EngineClient,
        request_timeout_s: float,
    ) -> None:
        self.decoder: msgspec.json.Decoder[ChatRequest | CompletionRequest] = msgspec.json.Decoder(body_type)
        self.answer_type = answer_type
        self.state = state
        self.admission = admission
        self.processor = processor
        self.engine = engine
        self.request_timeout_s = request_timeout_s
        self.model_name = processor.model.served_model_names[0]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a POST; raises ApiError while nothing has been sent."""
        self.state.check_accepting()
        arrival_time_s = time.monotonic()
        with self.admission.enter() as ticket:
            body = await read_body(request, self.decoder)
            ticket.grow(self.processor.check(body))
            submission = await self.processor.prepare(body, arrival_time_s, CALLER.get())
            ticket.queue(submission.prompt_lengths)
            answer = self.answer_type(self.model_name, submission.has_usage)

            def start(index: int) -> None:
                ticket.start(index // submission.num_requests_per_prompt)

            with self.engine.generate(submission.requests, start) as generation:
                deadline = self._set_deadline(generation)
                try:
                    choices = Choices(submission, generation, self.processor.tokenizer)
                    if submission.is_streamed:
                        return await self._stream(request, answer, choices)
                    return await self._collect(answer, choices)
                finally:
                    deadline.cancel()

    def _set_deadline(self, generation: Generation) -> asyncio.TimerHandle:
        error = ApiError(ErrorKind.REQUEST_TIMEOUT, f"the request took longer than {self.request_timeout_s:g} s")
        return asyncio.get_running_loop().call_later(self.request_timeout_s, generation.fail, error)

    async def _collect(self, answer: Answer, choices: Choices) -> web.Response:
        texts: list[list[str]] = [[] for _ in choices.processors]
        endings: dict[int, TextDelta] = {}
        while choices.num_unfinished:
            for index, delta in await choices.next_deltas():
                texts[index].append(delta.text)
                if delta.finish_reason is not None:
                    endings[index] = delta
        finished = [
            FinishedChoice("".join(texts[index]), str(endings[index].finish_reason), endings[index].stop_reason)
            for index in range(len(texts))
        ]
        return json_response(answer.whole(finished, choices.usage()))

    async def _stream(self, request: web.Request, answer: Answer, choices: Choices) -> web.StreamResponse:
        with SseWriter(request, choices.generation.wake) as writer:
            try:
                await _send_all(writer, EventBuilder(answer, choices), choices)
            except ConnectionError:  # the client left; leaving the generation aborts it
                return writer.response
            except Exception as problem:
                if not writer.has_started:
                    raise
                if not isinstance(problem, ApiError):
                    logger.exception("a stream failed")
                error = problem if isinstance(problem, ApiError) else internal_error()
                choices.generation.fail(error)
                await writer.send(event_of(error.to_json()))
            return await writer.end()


async def _send_all(writer: SseWriter, builder: EventBuilder, choices: Choices) -> None:
    while choices.num_unfinished:
        deltas = await choices.next_deltas()
        if not deltas:
            await writer.comment()
        elif events := b"".join([builder.events(index, delta) for index, delta in deltas]):
            await writer.send(events)
    await writer.send(builder.last_events())
