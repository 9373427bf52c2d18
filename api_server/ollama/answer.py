"""Answers of /api/chat and /api/generate: one JSON object, or lines of them of which the last has `done` and counts.

Rejected: a time of its own in each line, as Ollama has it; all lines of an answer say when the answer was begun.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.api_server.errors import ApiError, ErrorShape
from octavo.api_server.generation.job import Counts, Ending, OutputEvent, WholeChoice
from octavo.api_server.generation.run import Run
from octavo.api_server.http.sse import line_of
from octavo.api_server.http.surroundings import REQUEST_ID
from octavo.api_server.openai.logprobs import ChatTokenLogprob, chat_logprobs
from octavo.api_server.parsers.base import ToolCall
from octavo.protocol.engine_messages import FinishReason
from octavo.protocol.sampling_params import NO_LOGPROBS

CALL_ID_PREFIX = "call_"
NS_PER_S = 1_000_000_000


class Answer(msgspec.Struct, kw_only=True):
    """What both routes answer; all after `done` is there when it is true.

    Attributes:
        logprobs: of the tokens whose text begins in this line.
        done_reason: stop or length.
        total_duration, load_duration, prompt_eval_duration, eval_duration: nanoseconds since the request came, for
            loading the model (none), until the first output, and from there on.
        prompt_eval_count, eval_count: tokens of the prompt and of the output.
    """

    model: str
    created_at: datetime
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class AnsweredFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any]


class AnsweredCall(msgspec.Struct, kw_only=True):
    id: str
    function: AnsweredFunction


class AnsweredMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class OllamaChatAnswer(Answer, kw_only=True):
    """Answer, or line, of POST /api/chat."""

    message: AnsweredMessage


class OllamaGenerateAnswer(Answer, kw_only=True):
    """Answer, or line, of POST /api/generate."""

    response: str
    thinking: str | UnsetType = UNSET


Output = OutputEvent | WholeChoice
Shape = Callable[[Output, dict[str, Any]], Answer]  # of one route: from output and the fields that both routes have


def chat_answer(output: Output, fields: dict[str, Any]) -> OllamaChatAnswer:
    message = AnsweredMessage(
        content=output.content,
        thinking=output.reasoning or UNSET,
        tool_calls=[_call(call) for call in output.tool_calls] or UNSET,
    )
    return OllamaChatAnswer(message=message, **fields)


def generate_answer(output: Output, fields: dict[str, Any]) -> OllamaGenerateAnswer:
    return OllamaGenerateAnswer(response=output.content, thinking=output.reasoning or UNSET, **fields)


class OllamaRenderer:
    """The answer to one request of either route."""

    def __init__(self, shape: Shape, model_name: str, run: Run) -> None:
        self._shape = shape
        self._run = run
        self._has_logprobs = run.job.rendering.num_logprobs != NO_LOGPROBS
        self._envelope = {"model": model_name, "created_at": datetime.now(UTC)}
        self._ending = Ending(FinishReason.LENGTH.value)

    def whole(self, choices: Sequence[WholeChoice], counts: Counts) -> Answer:
        (choice,) = choices
        return self._shape(choice, {**self._fields(choice), **self._last_fields(choice.ending, counts)})

    def opening(self) -> bytes:
        return b""

    def events(self, output: OutputEvent) -> bytes:
        if output.ending is not None:
            self._ending = output.ending
        return line_of(self._shape(output, self._fields(output))) if output.has_output else b""

    def closing(self, counts: Counts) -> bytes:
        nothing = OutputEvent(0)
        return line_of(self._shape(nothing, {**self._envelope, **self._last_fields(self._ending, counts)}))

    def failure(self, error: ApiError) -> bytes:
        return error.render(ErrorShape.OLLAMA, REQUEST_ID.get()) + b"\n"

    def _fields(self, output: Output) -> dict[str, Any]:
        logprobs = chat_logprobs(output.logprobs, shows_ids=False).content if self._has_logprobs else UNSET
        return {**self._envelope, "logprobs": logprobs, "done": False}

    def _last_fields(self, ending: Ending, counts: Counts) -> dict[str, Any]:
        arrival_s, first_output_s, last_output_s = self._run.timing()
        is_cut = ending.finish_reason == FinishReason.LENGTH.value
        return {
            "done": True,
            "done_reason": ending.finish_reason if is_cut else FinishReason.STOP.value,
            "total_duration": _ns(last_output_s - arrival_s),
            "load_duration": 0,
            "prompt_eval_count": counts.num_prompt_tokens,
            "prompt_eval_duration": _ns(first_output_s - arrival_s),
            "eval_count": counts.num_output_tokens,
            "eval_duration": _ns(last_output_s - first_output_s),
        }


def _call(call: ToolCall) -> AnsweredCall:
    arguments = msgspec.json.decode(call.arguments, type=dict[str, Any])
    return AnsweredCall(
        id=CALL_ID_PREFIX + secrets.token_hex(12), function=AnsweredFunction(name=call.name, arguments=arguments)
    )


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
