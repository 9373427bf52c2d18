"""Request bodies of POST /api/chat and POST /api/generate, in Ollama's form.

A field that is absent or null has its default; unknown fields are ignored, and so are options about memory and threads,
which are this server's flags. What would change the answer and is not there is declared, so that it is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.api_server.conversation.tools import Tool
from octavo.api_server.openai.common_schemas import (
    MAX_STOP_STRINGS,
    NumAlternatives,
    Penalty,
    Probability,
    RepetitionPenalty,
    Share,
    ShortText,
    Temperature,
)
from octavo.protocol.sampling_params import MAX_SEED

Effort = Literal["low", "medium", "high"]


class OllamaOptions(msgspec.Struct, kw_only=True):
    """How tokens are chosen and when that ends; what is absent is as on the other routes, not Ollama's default.

    Attributes:
        num_predict: most output tokens; 0, -1 and -2: as many as the context leaves.
        repeat_penalty: divides logits above 0, and multiplies others, of tokens in the whole prompt or the output.
        repeat_last_n: only -1, which is the whole context, is supported.
        typical_p, tfs_z: only 1, which changes nothing, is supported.
        mirostat: only 0, which is off, is supported.
    """

    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Probability | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-1, le=MAX_SEED)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**63 - 1)] | None = None
    stop: ShortText | Annotated[list[ShortText], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_last_n: Any = None
    typical_p: Any = None
    tfs_z: Any = None
    mirostat: Any = None


class OllamaFields(msgspec.Struct, kw_only=True):
    """What both routes take.

    Attributes:
        stream: answer in lines of JSON as the text comes, which is the default.
    """

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Effort | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: NumAlternatives | None = None


class OllamaCalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made."""

    id: str | None = None
    function: OllamaCalledFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One of `messages`.

    Attributes:
        thinking: what the assistant thought before it said `content`.
        tool_name: whose result `content` is, in a message of the role tool.
        images: are not supported.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Any = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    """Body of POST /api/chat.

    Attributes:
        stream: answer in lines of JSON as the text comes, which is the default.
    """

    messages: list[OllamaMessage]
    tools: list[Tool] | None = None


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """Body of POST /api/generate.

    Attributes:
        prompt: what the user says; with `raw` the whole prompt.
        system: what the system says before that.
        raw: the prompt goes to the model as it is, without its chat template.
        stream: answer in lines of JSON as the text comes, which is the default.
    """

    prompt: str
    system: str | None = None
    raw: bool | None = None
    suffix: Any = None
    template: Any = None
    context: Any = None
    images: Any = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """Body of POST /api/show."""

    model: str
