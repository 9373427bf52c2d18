"""POST /v1/responses: its body as a draft, output in the shape of its answers. Nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from octavo.api_server.conversation.tool_support import check_tool_support
from octavo.api_server.errors import ApiError, unsupported
from octavo.api_server.generation.job import (
    Conversation,
    Counts,
    Draft,
    Ending,
    OutputEvent,
    Rendering,
    SamplingFields,
    WholeChoice,
)
from octavo.api_server.generation.run import Run
from octavo.api_server.http.sse import event
from octavo.api_server.openai.responses_answer import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    ErrorEvent,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseAnswer,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseUsage,
    ShownReasoning,
)
from octavo.api_server.openai.responses_input import messages_of, tool_use_of
from octavo.api_server.openai.responses_items import ItemWriter
from octavo.api_server.openai.responses_schemas import ResponsesRequest
from octavo.protocol.engine_messages import FinishReason
from octavo.protocol.sampling_params import NO_LOGPROBS

NO_OPS = {  # field -> the values that change nothing
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
}
LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
NUM_OPENING_EVENTS = 2  # they are made last, when there is output
PARAM_NAMES = {"prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


class ResponsesFormat:
    """The endpoint's bodies."""

    body_type = ResponsesRequest

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def draft(self, body: ResponsesRequest) -> Draft:
        _check_supported(body)
        check_tool_support(tool_use_of(body))
        effort = None if body.reasoning is None else body.reasoning.effort
        return Draft(
            model=body.model,
            prompts=Conversation(
                messages=messages_of(body.input, body.instructions),
                template_options={} if effort is None else {"reasoning_effort": effort},
            ),
            sampling=SamplingFields(
                max_tokens=body.max_output_tokens,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                seed=body.seed,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
            ),
            rendering=Rendering(is_streamed=bool(body.stream), num_logprobs=_num_logprobs(body)),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            param_names=PARAM_NAMES,
        )

    def renderer(self, body: ResponsesRequest, run: Run) -> ResponseRenderer:
        return ResponseRenderer(self.model_name, body, run)


class ResponseRenderer:
    """The answer to one request."""

    def __init__(self, model_name: str, body: ResponsesRequest, run: Run) -> None:
        self._writer = ItemWriter()
        self._num_events = NUM_OPENING_EVENTS
        self._ending = Ending(FinishReason.LENGTH.value)
        self._response = _in_progress(model_name, body, run)

    def whole(self, choices: Sequence[WholeChoice], counts: Counts) -> ResponseAnswer:
        (choice,) = choices
        for output in choice.events:
            self._writer.add(output)
        self._writer.finish(is_cut=_is_cut(choice.ending))
        return self._ended(choice.ending, counts)

    def opening(self) -> bytes:
        created = ResponseCreated(response=self._response, sequence_number=0)
        return _event(created) + _event(ResponseInProgress(response=self._response, sequence_number=1))

    def events(self, event: OutputEvent) -> bytes:
        events = self._writer.add(event)
        if event.ending is not None:
            self._ending = event.ending
            events += self._writer.finish(is_cut=_is_cut(event.ending))
        return self._events(events)

    def closing(self, counts: Counts) -> bytes:
        response = self._ended(self._ending, counts)
        if response.status == INCOMPLETE:
            return self._events([ResponseIncomplete(response=response)])
        return self._events([ResponseCompleted(response=response)])

    def failure(self, error: ApiError) -> bytes:
        detail = error.detail
        response = msgspec.structs.replace(
            self._response,
            status=FAILED,
            output=self._writer.items,
            error=ResponseError(detail.code, detail.message),
        )
        problem = ErrorEvent(code=detail.code, message=detail.message, param=detail.param, error=detail)
        return self._events([problem, ResponseFailed(response=response)])

    def _ended(self, ending: Ending, counts: Counts) -> ResponseAnswer:
        is_cut = _is_cut(ending)
        return msgspec.structs.replace(
            self._response,
            status=INCOMPLETE if is_cut else COMPLETED,
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._writer.items,
            usage=_usage(counts),
        )

    def _events(self, events: Sequence[ResponseEvent]) -> bytes:
        data = []
        for each in events:
            each.sequence_number = self._num_events
            self._num_events += 1
            data.append(_event(each))
        return b"".join(data)


def _event(content: ResponseEvent) -> bytes:
    return event(content, str(content.__struct_config__.tag))


def _check_supported(body: ResponsesRequest) -> None:
    """Raise ApiError for the first field that asks for what this server does not do."""
    for name, no_ops in NO_OPS.items():
        value = getattr(body, name)
        if value is not None and value not in no_ops:
            raise unsupported(name)
    text = body.text
    if text is not None and text.format is not None and text.format.type != "text":
        raise unsupported("text.format", "other than text is not supported by this server")
    if text is not None and text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", "other than medium is not supported by this server")
    for index, name in enumerate(body.include or ()):
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            raise unsupported(f"include[{index}]")


def _num_logprobs(body: ResponsesRequest) -> int:
    if body.top_logprobs is None and LOGPROBS not in (body.include or ()):
        return NO_LOGPROBS
    return body.top_logprobs or 0


def _in_progress(model_name: str, body: ResponsesRequest, run: Run) -> ResponseAnswer:
    params = run.job.sampling_params(0)
    reasoning = body.reasoning
    return ResponseAnswer(
        id="resp_" + secrets.token_hex(16),
        created_at=int(time.time()),
        status=IN_PROGRESS,
        model=model_name,
        instructions=body.instructions,
        tools=body.tools or [],
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=ShownReasoning() if reasoning is None else ShownReasoning(effort=reasoning.effort),
        temperature=params.temperature,
        top_p=params.top_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        top_logprobs=body.top_logprobs or 0,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )


def _is_cut(ending: Ending) -> bool:
    return ending.finish_reason == FinishReason.LENGTH.value


def _usage(counts: Counts) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=counts.num_prompt_tokens,
        input_tokens_details=InputTokensDetails(counts.num_cached_tokens),
        output_tokens=counts.num_output_tokens,
        output_tokens_details=OutputTokensDetails(counts.num_reasoning_tokens or 0),
        total_tokens=counts.num_tokens,
    )
