"""Ollama's bodies as drafts; every error names the field, those of `options` as `options.NAME`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.api_server.conversation.messages import SYSTEM, USER, Message, PastCall, check_number_of_messages
from octavo.api_server.conversation.tools import resolve_tools
from octavo.api_server.errors import invalid_value, unsupported
from octavo.api_server.generation.job import Conversation, Draft, Prompts, Rendering, SamplingFields
from octavo.api_server.ollama.schemas import (
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from octavo.protocol.sampling_params import NO_LOGPROBS

LATEST = ":latest"  # the tag that a name without one has
OPTION_NAMES = {  # our names -> those among `options`
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    **{
        name: name
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "stop",
            "presence_penalty",
            "frequency_penalty",
        )
    },
}
PARAM_NAMES = {
    **{ours: f"options.{theirs}" for ours, theirs in OPTION_NAMES.items()},
    "chat_template_kwargs": "think",
    "logprobs": "top_logprobs",
    "tool_choice": "tools",
}
CHAT_PARAM_NAMES = {**PARAM_NAMES, "prompt": "messages"}
OPTION_NO_OPS: Mapping[str, Any] = {"repeat_last_n": -1, "typical_p": 1, "tfs_z": 1, "mirostat": 0}


def chat_draft(body: OllamaChatRequest) -> Draft:
    """Return what a body of /api/chat asks for; raises ApiError."""
    check_number_of_messages(len(body.messages), "messages")
    conversation = Conversation(
        messages=tuple(_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)),
        tool_use=resolve_tools(body.tools),
        template_options=_template_options(body),
    )
    return _draft(body, conversation, CHAT_PARAM_NAMES)


def generate_draft(body: OllamaGenerateRequest) -> Draft:
    """Return what a body of /api/generate asks for; raises ApiError."""
    for name in ("suffix", "template", "context", "images"):
        if getattr(body, name):
            raise unsupported(name)
    return _draft(body, _prompt_of(body), PARAM_NAMES)


def _prompt_of(body: OllamaGenerateRequest) -> Prompts | Conversation:
    if not body.raw:
        system = [Message(role=SYSTEM, content=body.system)] if body.system else []
        messages = (*system, Message(role=USER, content=body.prompt))
        return Conversation(messages=messages, template_options=_template_options(body))
    for name in ("system", "think"):
        if getattr(body, name) is not None:
            raise invalid_value(name, "needs the chat template, which raw: true leaves out")
    return (body.prompt,)


def _draft(body: OllamaFields, prompts: Prompts | Conversation, param_names: Mapping[str, str]) -> Draft:
    if body.format:
        raise unsupported("format")
    options = body.options or OllamaOptions()
    for name, no_op in OPTION_NO_OPS.items():
        if getattr(options, name) not in (None, no_op):
            raise unsupported(f"options.{name}", f"other than {no_op} is not supported by this server")
    return Draft(
        model=body.model.removesuffix(LATEST),
        prompts=prompts,
        sampling=_sampling(options),
        rendering=Rendering(is_streamed=body.stream is not False, num_logprobs=_num_logprobs(body)),
        stop=(options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ()),
        param_names=param_names,
    )


def _sampling(options: OllamaOptions) -> SamplingFields:
    num_predict = options.num_predict
    return SamplingFields(
        max_tokens=num_predict if num_predict is not None and num_predict > 0 else None,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )


def _num_logprobs(body: OllamaFields) -> int:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid_value("top_logprobs", "needs logprobs: true")
    return NO_LOGPROBS


def _template_options(body: OllamaFields) -> dict[str, bool | str]:
    if body.think is None:
        return {}
    return {"enable_thinking": body.think} if isinstance(body.think, bool) else {"reasoning_effort": body.think}


def _message(message: OllamaMessage, param: str) -> Message:
    if message.images:
        raise unsupported(f"{param}.images", "are not supported: this server takes text only")
    return Message(
        role=message.role,
        content=message.content or "",
        name=message.tool_name,
        reasoning=message.thinking,
        tool_calls=tuple(
            PastCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id,
    )
