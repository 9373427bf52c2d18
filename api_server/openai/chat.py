"""POST /v1/chat/completions: its body as a draft, output in the shape of its answers."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from octavo.api_server.conversation.messages import ASSISTANT, Message
from octavo.api_server.conversation.tools import resolve_tools
from octavo.api_server.errors import invalid_value
from octavo.api_server.generation.job import Conversation, Draft, OutputEvent, WholeChoice
from octavo.api_server.generation.run import Run
from octavo.api_server.openai.chat_messages import messages_of
from octavo.api_server.openai.chat_schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatRequest,
    Delta,
    ToolCallAnswer,
    ToolCallFunction,
)
from octavo.api_server.openai.common_schemas import Usage
from octavo.api_server.openai.fields import rendering_of, sampling_fields, shared_parts
from octavo.api_server.openai.logprobs import chat_logprobs, prompt_logprobs
from octavo.api_server.openai.renderer import ChunkRenderer, Envelope
from octavo.api_server.openai.unsupported import CHAT_NO_OPS, check_supported
from octavo.api_server.parsers.base import ToolCall
from octavo.protocol.sampling_params import NO_LOGPROBS

CALL_ID_PREFIX = "call_"


class ChatFormat:
    """The endpoint's bodies."""

    body_type = ChatRequest

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def draft(self, body: ChatRequest) -> Draft:
        check_supported(body, CHAT_NO_OPS)
        param_names = {"prompt": "messages", "logprobs": "top_logprobs"}
        max_tokens = body.max_tokens
        if body.max_completion_tokens is not None:
            max_tokens, param_names["max_tokens"] = body.max_completion_tokens, "max_completion_tokens"
        return Draft(
            prompts=_conversation(body),
            sampling=sampling_fields(body, max_tokens),
            rendering=rendering_of(body, num_logprobs=_num_logprobs(body)),
            param_names=param_names,
            **shared_parts(body),
        )

    def renderer(self, body: ChatRequest, run: Run) -> ChunkRenderer:
        envelope = Envelope.create("chatcmpl-", self.model_name, body)
        return ChunkRenderer(ChatShape(envelope, body, run), body, run)


class ChatShape:
    """The answer to one chat request."""

    def __init__(self, envelope: Envelope, body: ChatRequest, run: Run) -> None:
        self.envelope = envelope
        self.body = body
        self.run = run
        self._num_calls: Counter[int] = Counter()  # choice -> calls that it has made

    def opening_chunk(self, index: int) -> ChatChunk:
        chunk = self._chunk(ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""), finish_reason=None))
        chunk.prompt_token_ids = self._prompt_token_ids()
        return chunk

    def chunk(self, output: OutputEvent) -> ChatChunk:
        delta = Delta(
            content=output.content or UNSET,
            reasoning_content=output.reasoning or UNSET,
            reasoning=output.reasoning or UNSET,
            tool_calls=self._calls(output.index, output.tool_calls) or UNSET,
        )
        return self._chunk(ChatChunkChoice(index=output.index, delta=delta, finish_reason=None, **self._extras(output)))

    def finish_chunk(self, output: OutputEvent) -> ChatChunk:
        reason, stop_reason = output.ending or (None, None)
        return self._chunk(
            ChatChunkChoice(index=output.index, delta=Delta(), finish_reason=reason, stop_reason=stop_reason)
        )

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(**self.envelope.fields("chat.completion.chunk"), choices=[], usage=usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> ChatCompletion:
        num_listed = self.run.job.rendering.num_prompt_logprobs
        has_prompt = num_listed != NO_LOGPROBS
        return ChatCompletion(
            **self.envelope.fields("chat.completion"),
            choices=[self._choice(choice) for choice in choices],
            usage=usage,
            prompt_logprobs=prompt_logprobs(self.run.prompt_logprobs(0), num_listed) if has_prompt else UNSET,
            prompt_token_ids=self._prompt_token_ids(),
        )

    def _choice(self, choice: WholeChoice) -> ChatChoice:
        calls = [_call(call) for call in choice.tool_calls]
        message = AssistantMessage(
            content=None if calls and not choice.content else choice.content,
            reasoning_content=choice.reasoning or UNSET,
            reasoning=choice.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(
            index=choice.index,
            message=message,
            finish_reason=choice.ending.finish_reason,
            stop_reason=choice.ending.stop_reason,
            **{"logprobs": None, **self._extras(choice)},
        )

    def _extras(self, output: OutputEvent | WholeChoice) -> dict[str, Any]:
        """Return the fields beside the message that the client asked for."""
        extras: dict[str, Any] = {}
        if self.body.logprobs:
            extras["logprobs"] = chat_logprobs(output.logprobs, bool(self.body.return_tokens_as_token_ids))
        if self.body.return_token_ids:
            extras["token_ids"] = [*output.token_ids]
        return extras

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self.run.job.prompt_token_ids(0) if self.body.return_token_ids else UNSET

    def _calls(self, index: int, calls: Sequence[ToolCall]) -> list[ToolCallAnswer]:
        first = self._num_calls[index]
        self._num_calls[index] += len(calls)
        return [_call(call, place) for place, call in enumerate(calls, first)]

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        fields = self.envelope.fields("chat.completion.chunk")
        return ChatChunk(**fields, choices=[choice], usage=self.envelope.usage)


def _call(call: ToolCall, place: int | UnsetType = UNSET) -> ToolCallAnswer:
    function = ToolCallFunction(name=call.name, arguments=call.arguments)
    return ToolCallAnswer(index=place, id=CALL_ID_PREFIX + secrets.token_hex(12), function=function)


def _num_logprobs(body: ChatRequest) -> int:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid_value("top_logprobs", "needs logprobs: true")
    return NO_LOGPROBS


def _conversation(body: ChatRequest) -> Conversation:
    messages = messages_of(body.messages)
    continues = bool(body.continue_final_message)
    if continues:
        _check_continued(body, messages[-1])
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return Conversation(
        messages=messages,
        adds_generation_prompt=not continues and body.add_generation_prompt is not False,
        continues_final_message=continues,
        tool_use=resolve_tools(body.tools, body.tool_choice, body.parallel_tool_calls),
        template_options={**effort, **(body.chat_template_kwargs or {})},
    )


def _check_continued(body: ChatRequest, last: Message) -> None:
    if body.add_generation_prompt:
        raise invalid_value("continue_final_message", "does not go with add_generation_prompt: true")
    if last.role != ASSISTANT or last.tool_calls:
        raise invalid_value("continue_final_message", "needs a last message of the assistant, without tool calls")
