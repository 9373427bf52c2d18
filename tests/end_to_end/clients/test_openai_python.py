"""OpenAI's Python client against the embedded model: every call that it has for what this server does."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from embedded_model import EMBEDDED_MODEL
from server_process import ServerProcess

pytestmark = pytest.mark.model

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": EMBEDDED_MODEL, "temperature": 0}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    assert model.id == EMBEDDED_MODEL


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=CAPITAL, max_completion_tokens=40, **GREEDY)
    (choice,) = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id


def test_a_streamed_chat_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"messages": CAPITAL, "max_tokens": 40, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(texts) > 3
    assert "".join(texts) == final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.choices[0].logprobs == whole.choices[0].logprobs
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_tools_that_may_be_called_and_are_not(client: openai.OpenAI) -> None:
    tools = {"tools": [WEATHER], "tool_choice": "auto", "max_tokens": 32}
    plain = client.chat.completions.create(messages=CAPITAL, max_tokens=1, **GREEDY)
    offered = client.chat.completions.create(messages=CAPITAL, **tools, **GREEDY)
    assert plain.usage is not None
    assert offered.usage is not None
    assert offered.usage.prompt_tokens > plain.usage.prompt_tokens, "the model is told about them"
    assert offered.choices[0].message.content or offered.choices[0].message.tool_calls


def test_completions_with_echo_and_logprobs(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    answer = client.completions.create(prompt=prompt, max_tokens=4, echo=True, logprobs=2, **GREEDY)
    (choice,) = answer.choices
    assert choice.text.startswith(prompt + " Paris")
    assert choice.logprobs is not None
    tokens, values = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
    assert "".join(tokens) == choice.text
    assert answer.usage is not None
    assert len(values) == answer.usage.total_tokens
    assert values[0] is None
    assert all(value <= 0 for value in values[1:])


def test_a_streamed_completion_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"prompt": ["One, two,", "Red, green,"], "max_tokens": 12, "n": 2, "seed": 7}
    whole = client.completions.create(model=EMBEDDED_MODEL, **options)
    texts = [""] * 4
    for chunk in client.completions.create(model=EMBEDDED_MODEL, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] != texts[1]


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(input="What is the capital of France?", max_output_tokens=40, **GREEDY)
    assert "Paris" in answer.output_text
    assert (answer.status, answer.model) == ("completed", EMBEDDED_MODEL)
    assert answer.usage is not None
    assert answer.usage.output_tokens > 0


def test_a_streamed_response_adds_up_to_the_whole_one(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"input": "What is the capital of France?", "max_output_tokens": 40, **GREEDY}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(texts) > 3
    assert "".join(texts) == final.output_text == whole.output_text
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")


def test_a_conversation_goes_on_with_what_was_answered(client: openai.OpenAI) -> None:
    first = client.responses.create(input="My name is Ada.", max_output_tokens=16, **GREEDY)
    history: Any = [
        {"role": "user", "content": "My name is Ada."},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"role": "user", "content": "What is my name?"},
    ]
    second = client.responses.create(input=history, max_output_tokens=16, **GREEDY)
    assert second.output_text


async def test_many_at_once(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        async def whole(number: int) -> str:
            answer = await client.completions.create(prompt=f"{number} is", max_tokens=8, **GREEDY)
            return answer.choices[0].text

        async def streamed(number: int) -> str:
            stream = await client.completions.create(prompt=f"{number} is", max_tokens=8, stream=True, **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*map(whole, range(8)), *map(streamed, range(8)))
    assert texts[:8] == texts[8:]
    assert len(set(texts)) > 4


def test_errors_are_of_their_type_and_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="nope", messages=CAPITAL)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(messages=CAPITAL, model=EMBEDDED_MODEL, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(prompt="long " * 4000, **GREEDY)
    assert too_long.value.code == "context_length_exceeded"
