"""Ollama's bodies to drafts: what each field means here, and what is refused by which name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.api_server.conversation.messages import Message, PastCall
from octavo.api_server.errors import ApiError, ErrorKind
from octavo.api_server.generation.job import Conversation, Draft
from octavo.api_server.ollama.drafts import chat_draft, generate_draft
from octavo.api_server.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest
from octavo.protocol.sampling_params import NO_LOGPROBS

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(*messages: dict[str, Any], **fields: Any) -> Draft:
    body = {"model": "m", "messages": messages or (USER,), **fields}
    return chat_draft(msgspec.convert(body, OllamaChatRequest))


def generate(**fields: Any) -> Draft:
    return generate_draft(msgspec.convert({"model": "m", "prompt": "Hi", **fields}, OllamaGenerateRequest))


def conversation(draft: Draft) -> Conversation:
    assert isinstance(draft.prompts, Conversation)
    return draft.prompts


def test_a_stream_is_the_default() -> None:
    assert chat().rendering.is_streamed
    assert not chat(stream=False).rendering.is_streamed


def test_options_are_sampling() -> None:
    options = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
        "num_predict": 9,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "stop": ["a", "b"],
        "num_ctx": 4096,
        "num_thread": 2,
        "repeat_last_n": -1,
        "typical_p": 1.0,
        "mirostat": 0,
    }
    draft = generate(options=options)
    found = draft.sampling
    assert (found.temperature, found.top_k, found.top_p, found.min_p, found.seed) == (0.5, 3, 0.9, 0.1, 7)
    assert (found.max_tokens, found.repetition_penalty) == (9, 1.5)
    assert (found.presence_penalty, found.frequency_penalty) == (0.25, -0.25)
    assert draft.stop == ("a", "b")
    assert generate(options={"stop": "x"}).stop == ("x",)


@pytest.mark.parametrize("num_predict", [-2, -1, 0])
def test_no_limit_is_the_contexts(num_predict: int) -> None:
    assert generate(options={"num_predict": num_predict}).sampling.max_tokens is None


def test_a_prompt_is_what_the_user_says_unless_it_is_raw() -> None:
    draft = generate(system="Be brief.")
    assert conversation(draft).messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hi"),
    )
    assert generate(raw=True).prompts == ("Hi",)


@pytest.mark.parametrize(
    ("think", "options"),
    [(None, {}), (False, {"enable_thinking": False}), (True, {"enable_thinking": True}),
     ("high", {"reasoning_effort": "high"})],
)  # fmt: skip
def test_think_is_an_option_of_the_template(think: Any, options: dict[str, Any]) -> None:
    assert conversation(chat(think=think)).template_options == options
    assert conversation(generate(think=think)).template_options == options


def test_a_history_with_thoughts_calls_and_results() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}, "index": 0}}
    draft = chat(
        USER,
        {"role": "assistant", "content": "", "thinking": "Hm", "tool_calls": [call]},
        {"role": "tool", "tool_name": "f", "content": "3"},
        tools=[TOOL],
    )
    assert conversation(draft).messages[1:] == (
        Message(role="assistant", reasoning="Hm", tool_calls=(PastCall(None, "f", {"a": 1}),)),
        Message(role="tool", name="f", content="3"),
    )
    assert [tool.name for tool in conversation(draft).tool_use.callable_tools] == ["f"]


def test_logprobs() -> None:
    assert chat().rendering.num_logprobs == NO_LOGPROBS
    assert chat(logprobs=True).rendering.num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).rendering.num_logprobs == 3


def test_the_tag_latest_is_no_other_model() -> None:
    assert chat(model="m:latest").model == "m"
    assert chat(model="m:7b").model == "m:7b"


@pytest.mark.parametrize(
    ("fields", "param", "kind"),
    [
        ({"raw": True, "system": "x"}, "system", ErrorKind.INVALID_VALUE),
        ({"raw": True, "think": True}, "think", ErrorKind.INVALID_VALUE),
        ({"suffix": "x"}, "suffix", ErrorKind.UNSUPPORTED),
        ({"format": "json"}, "format", ErrorKind.UNSUPPORTED),
        ({"format": {"type": "object"}}, "format", ErrorKind.UNSUPPORTED),
        ({"template": "x"}, "template", ErrorKind.UNSUPPORTED),
        ({"context": [1]}, "context", ErrorKind.UNSUPPORTED),
        ({"images": ["x"]}, "images", ErrorKind.UNSUPPORTED),
        ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n", ErrorKind.UNSUPPORTED),
        ({"options": {"mirostat": 1}}, "options.mirostat", ErrorKind.UNSUPPORTED),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z", ErrorKind.UNSUPPORTED),
        ({"top_logprobs": 2}, "top_logprobs", ErrorKind.INVALID_VALUE),
    ],
)
def test_what_is_not_there_is_refused_by_name(fields: dict[str, Any], param: str, kind: ErrorKind) -> None:
    with pytest.raises(ApiError) as caught:
        generate(**fields)
    assert (caught.value.param, caught.value.kind) == (param, kind)


def test_what_changes_nothing_passes() -> None:
    generate(suffix="", template="", context=[], images=[], format="", top_logprobs=0)


def test_an_image_is_named_by_its_message() -> None:
    with pytest.raises(ApiError) as caught:
        chat(USER, {**USER, "images": ["aGk="]})
    assert caught.value.param == "messages[1].images"


@pytest.mark.parametrize("fields", [{"prompt": "x"}, {}])
def test_names_of_fields_are_the_routes(fields: dict[str, Any]) -> None:
    draft = generate(**fields) if fields else chat()
    assert draft.param("max_tokens") == "options.num_predict"
    assert draft.param("repetition_penalty") == "options.repeat_penalty"
    assert draft.param("stop") == "options.stop"
    assert draft.param("prompt") == ("prompt" if fields else "messages")
