"""POST /v1/messages and the count of its tokens: bodies as drafts, output in the shape of Anthropic's answers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from octavo.api_server.anthropic.answer import (
    CountTokensAnswer,
    DeltaUsage,
    MessageAnswer,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopDelta,
)
from octavo.api_server.anthropic.blocks import BlockWriter
from octavo.api_server.anthropic.input import conversation_of, tool_use_of
from octavo.api_server.anthropic.schemas import CountTokensRequest, MessagesRequest
from octavo.api_server.conversation.tool_support import check_tool_support
from octavo.api_server.errors import ApiError, ErrorShape, invalid_value, unsupported
from octavo.api_server.generation.gate import check_model
from octavo.api_server.generation.job import Counts, Draft, Ending, OutputEvent, Rendering, SamplingFields, WholeChoice
from octavo.api_server.generation.output_processor import TOOL_CALLS
from octavo.api_server.generation.prompts import encode_prompts
from octavo.api_server.generation.run import Generator, Run
from octavo.api_server.health import ServerState, json_response
from octavo.api_server.http.body import read_body
from octavo.api_server.http.sse import event, event_of
from octavo.api_server.http.surroundings import REQUEST_ID
from octavo.protocol.engine_messages import FinishReason

NOT_SUPPORTED = ("container", "context_management", "mcp_servers", "output_config", "output_format")
PARAM_NAMES = {"prompt": "messages", "stop": "stop_sequences", "chat_template_kwargs": "thinking"}


class MessagesFormat:
    """The endpoint's bodies."""

    body_type = MessagesRequest

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def draft(self, body: MessagesRequest) -> Draft:
        _check_supported(body)
        return Draft(
            model=body.model,
            prompts=conversation_of(body),
            sampling=SamplingFields(
                max_tokens=body.max_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
            ),
            rendering=Rendering(is_streamed=bool(body.stream)),
            stop=tuple(body.stop_sequences or ()),
            param_names=PARAM_NAMES,
        )

    def renderer(self, body: MessagesRequest, run: Run) -> MessageRenderer:
        return MessageRenderer(self.model_name, run)


class MessageRenderer:
    """The answer to one request."""

    def __init__(self, model_name: str, run: Run) -> None:
        self._id = "msg_" + secrets.token_hex(12)
        self._model_name = model_name
        self._run = run
        self._writer = BlockWriter()
        self._ending = Ending(FinishReason.LENGTH.value)

    def whole(self, choices: Sequence[WholeChoice], counts: Counts) -> MessageAnswer:
        (choice,) = choices
        for output in choice.events:
            self._writer.add(output)
        self._writer.finish()
        reason, sequence = _stop_of(choice.ending)
        return MessageAnswer(
            id=self._id,
            model=self._model_name,
            content=self._writer.blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=MessageUsage(**_usage_of(counts)),
        )

    def opening(self) -> bytes:
        usage = MessageUsage(**{**_usage_of(self._run.counts()), "output_tokens": 0})
        return _events([MessageStart(message=MessageAnswer(id=self._id, model=self._model_name, usage=usage)), Ping()])

    def events(self, event: OutputEvent) -> bytes:
        events = self._writer.add(event)
        if event.ending is not None:
            self._ending = event.ending
            events += self._writer.finish()
        return _events(events)

    def closing(self, counts: Counts) -> bytes:
        reason, sequence = _stop_of(self._ending)
        delta = StopDelta(stop_reason=reason, stop_sequence=sequence)
        return _events([MessageDelta(delta=delta, usage=DeltaUsage(**_usage_of(counts))), MessageStop()])

    def failure(self, error: ApiError) -> bytes:
        return event_of(error.render(ErrorShape.ANTHROPIC, REQUEST_ID.get()), "error")


class CountTokens:
    """Handler of the count, which is that of the very prompt that POST /v1/messages would compute."""

    def __init__(self, generator: Generator, state: ServerState) -> None:
        self.generator = generator
        self.state = state
        self.decoder = msgspec.json.Decoder(CountTokensRequest)

    async def handle(self, request: web.Request) -> web.Response:
        self.state.check_accepting()
        gate = self.generator.gate
        with self.generator.admit():
            body = await read_body(request, self.decoder)
            check_model(body.model, gate.model.served_model_names)
            check_tool_support(tool_use_of(body))
            draft = Draft(model=body.model, prompts=conversation_of(body), param_names=PARAM_NAMES)
            ((token_ids, _),) = await encode_prompts(draft, gate.tokenizer)
            return json_response(CountTokensAnswer(len(token_ids)))


def _check_supported(body: MessagesRequest) -> None:
    """Raise ApiError for the first field that asks for what this server does not do."""
    check_tool_support(tool_use_of(body))
    for name in NOT_SUPPORTED:
        if getattr(body, name) is not None:
            raise unsupported(name)
    thinking = body.thinking
    if thinking is not None and (thinking.budget_tokens or 0) >= body.max_tokens:
        raise invalid_value("thinking.budget_tokens", "must be less than max_tokens")
    if thinking is not None and thinking.display not in (None, "summarized"):
        raise unsupported("thinking.display", "other than summarized is not supported by this server")


def _stop_of(ending: Ending) -> tuple[str, str | None]:
    """Return why the message ended, and at which stop sequence."""
    if ending.finish_reason == TOOL_CALLS:
        return "tool_use", None
    if ending.finish_reason == FinishReason.LENGTH.value:
        return "max_tokens", None
    return ("stop_sequence", ending.stop_reason) if isinstance(ending.stop_reason, str) else ("end_turn", None)


def _usage_of(counts: Counts) -> dict[str, Any]:
    """Return the fields of a usage that have values."""
    return {
        "input_tokens": counts.num_prompt_tokens - counts.num_cached_tokens,
        "cache_read_input_tokens": counts.num_cached_tokens,
        "output_tokens": counts.num_output_tokens,
    }


def _events(events: Sequence[MessageEvent]) -> bytes:
    return b"".join([event(each, str(each.__struct_config__.tag)) for each in events])
