"""The answer of POST /v1/responses: the response, its items, and the events that tell of them.

OpenAI's schema requires every field of a response, null where it has no value. Structs are told apart by `type`, which
is their tag, and the tag of an event is its name in the stream as well.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.api_server.errors import ErrorDetail
from octavo.api_server.openai.logprobs import ChatTokenLogprob
from octavo.api_server.openai.responses_schemas import FunctionTool, TextFormat, ToolChoiceObject

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str = IN_PROGRESS
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought; there is never a summary."""

    id: str
    status: str = IN_PROGRESS
    summary: list[Any] = []
    content: list[ReasoningText] = []


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call. `arguments` is the text of a JSON object."""

    id: str
    status: str = IN_PROGRESS
    call_id: str
    name: str
    arguments: str = ""


Part = OutputText | ReasoningText
Item = MessageItem | ReasoningItem | FunctionCallItem


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ShownText(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat = TextFormat()
    verbosity: str = "medium"


class ShownReasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/responses.

    Attributes:
        status: in_progress (in a stream only), completed, incomplete or failed.
        store: always false.
    """

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = IN_PROGRESS
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    model: str
    instructions: str | None
    output: list[Item] = []
    tools: list[FunctionTool]
    tool_choice: str | ToolChoiceObject
    parallel_tool_calls: bool
    text: ShownText = ShownText()
    reasoning: ShownReasoning
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    max_output_tokens: int | None
    max_tool_calls: int | None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str]
    store: bool = False
    background: bool = False
    previous_response_id: None = None
    service_tier: str = "default"
    safety_identifier: str | None
    prompt_cache_key: str | None


class ResponseEvent(msgspec.Struct, kw_only=True, tag_field="type"):
    """Base of the events; `sequence_number` counts them from 0."""

    sequence_number: int = 0


class LifeEvent(ResponseEvent, kw_only=True):
    """Base of the events that say how far the whole response is."""

    response: ResponseAnswer


class ResponseCreated(LifeEvent, tag="response.created"):
    pass


class ResponseInProgress(LifeEvent, tag="response.in_progress"):
    pass


class ResponseCompleted(LifeEvent, tag="response.completed"):
    pass


class ResponseIncomplete(LifeEvent, tag="response.incomplete"):
    pass


class ResponseFailed(LifeEvent, tag="response.failed"):
    pass


class ItemAdded(ResponseEvent, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(ResponseEvent, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: Item


class InItem(ResponseEvent, kw_only=True):
    """Base of the events inside an item."""

    item_id: str
    output_index: int


class InPart(InItem, kw_only=True):
    """Base of the events inside a part; an item has one part."""

    content_index: int = 0


class PartAdded(InPart, kw_only=True, tag="response.content_part.added"):
    part: Part


class PartDone(InPart, kw_only=True, tag="response.content_part.done"):
    part: Part


class OutputTextDelta(InPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(InPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningTextDelta(InPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(InPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(InItem, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class ErrorEvent(ResponseEvent, kw_only=True, tag="error"):
    """Why a stream breaks, in the two places where clients look."""

    code: str
    message: str
    param: str | None
    error: ErrorDetail


StreamEvent = (
    ResponseCreated
    | ResponseInProgress
    | ItemAdded
    | PartAdded
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | PartDone
    | ArgumentsDelta
    | ArgumentsDone
    | ItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ErrorEvent
    | ResponseFailed
)
