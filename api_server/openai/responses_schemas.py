"""The request body of POST /v1/responses. See `common_schemas` for the rules.

Items and content parts are one struct each, whatever their `type`: OpenAI lets messages leave the type out, and an
unknown one has to be refused by its place. `responses_input` checks what each type needs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.api_server.openai.chat_schemas import ReasoningEffort
from octavo.api_server.openai.common_schemas import (
    Int32,
    Name128,
    NumAlternatives,
    Penalty,
    Positive,
    Probability,
    Temperature,
)
from octavo.protocol.sampling_params import MAX_SEED

MAX_METADATA = 16
ToolMode = Literal["none", "auto", "required"]


class InputPart(msgspec.Struct, kw_only=True):
    """Part of a content, of an output or of a reasoning."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """One of `input`.

    Attributes:
        type: message (the default), function_call, function_call_output or reasoning.
        role: of a message: user, assistant, system or developer.
        content: text, or its parts; of a message or a reasoning.
        phase: accepted and ignored.
        call_id: of a function_call, and of the function_call_output that answers it.
        arguments: of a function_call: the text of a JSON object.
        output: of a function_call_output: text, or its parts.
        encrypted_content: of a reasoning: ignored, for this server encrypts nothing.
    """

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    encrypted_content: str | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """One of `tools`; also in answers, which is why every field is always there."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(msgspec.Struct, kw_only=True):
    """One of the tools that `tool_choice` allows."""

    type: str = "function"
    name: str


class ToolChoiceObject(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`tool_choice` when it is an object.

    Attributes:
        type: function or allowed_tools.
        name: of the function.
        mode, tools: of allowed_tools.
    """

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ChosenTool] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What form the text has: text, and nothing else yet."""

    type: str = "text"


class TextOptions(msgspec.Struct, kw_only=True):
    """`verbosity` is a hint that no chat template knows; only its default is taken."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """`summary` is accepted and ignored: thoughts are shown as they are."""

    effort: ReasoningEffort | None = None
    summary: str | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """`include_obfuscation` is accepted and ignored."""

    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses.

    Attributes:
        input: a text of the user, or the items of a conversation, oldest first.
        instructions: what the system says before `input`.
        max_output_tokens: most output tokens, thoughts included; the context bounds them too.
        top_logprobs: logprobs of each output token, and of so many of the likeliest in each place.
        include: message.output_text.logprobs asks for logprobs; reasoning.encrypted_content is ignored.
        text: form of the text.
        reasoning: how much the model is to think.
        metadata: comes back in the answer.
        truncation: disabled, and nothing else.
        store: false, and nothing else: this server keeps no answers.
        service_tier, safety_identifier, prompt_cache_key, user: accepted and ignored.
        background: false, and nothing else.
        max_tool_calls: ignored: it bounds tools that the server calls itself, and there are none.
    """

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-1, le=MAX_SEED)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    top_logprobs: NumAlternatives | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolMode | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_METADATA)] | None = None
    truncation: str | None = None
    store: bool | None = None
    background: bool | None = None
    service_tier: Name128 | None = None
    safety_identifier: Name128 | None = None
    prompt_cache_key: Name128 | None = None
    user: Name128 | None = None
    priority: Int32 | None = None
    cache_salt: Name128 | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
