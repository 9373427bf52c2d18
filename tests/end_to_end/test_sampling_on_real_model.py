"""Logprobs, echo, bias and bans on the embedded model, through the real processes and the client of OpenAI."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
VOCAB_SIZE = 49152
PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "Write an emoji and a Chinese word."}]


async def complete(client: openai.AsyncOpenAI, **arguments: Any) -> Any:
    arguments = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, **arguments}
    answer = await client.completions.create(model=MODEL, **arguments)
    return answer.choices[0]


async def test_a_text_is_scored_as_it_was_when_it_was_generated(embedded_client: openai.AsyncOpenAI) -> None:
    generated = await complete(embedded_client, logprobs=3)
    scored = await complete(embedded_client, prompt=PROMPT + generated.text, max_tokens=0, echo=True, logprobs=3)
    num_tokens = len(generated.logprobs.tokens)
    assert num_tokens == 8
    assert scored.text == PROMPT + generated.text
    assert scored.logprobs.tokens[-num_tokens:] == generated.logprobs.tokens
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[-num_tokens:] == generated.logprobs.token_logprobs
    assert scored.logprobs.top_logprobs[-num_tokens:] == generated.logprobs.top_logprobs


async def test_b16_a_greedy_token_is_the_likeliest_of_its_own_place(embedded_client: openai.AsyncOpenAI) -> None:
    answer = await embedded_client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=16, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode(errors="replace") == (
        choice.message.content
    )
    for entry in entries:
        top = entry.top_logprobs
        assert (top[0].token, top[0].logprob) == (entry.token, entry.logprob)
        assert [each.logprob for each in top] == sorted((each.logprob for each in top), reverse=True)
        assert len(top) == 3
        assert sum(math.exp(each.logprob) for each in top) <= 1 + 1e-6
    assert len({entry.top_logprobs[0].logprob for entry in entries}) > 1


async def test_a_stream_joined_is_the_whole_answer_with_its_logprobs(embedded_client: openai.AsyncOpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL, "messages": QUESTION, "temperature": 1, "seed": 3, "max_tokens": 40, "n": 2,
        "logprobs": True, "top_logprobs": 2, "stop": ["."],
    }  # fmt: skip
    whole = await embedded_client.chat.completions.create(**arguments)
    texts, entries = ["", ""], [[], []]  # type: ignore[var-annotated]
    async for chunk in await embedded_client.chat.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            entries[choice.index] += (choice.logprobs.content or []) if choice.logprobs is not None else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert entries == [choice.logprobs.content for choice in whole.choices if choice.logprobs is not None]


async def test_b27_bad_ids_disturb_nobody_and_a_bias_forces_and_bans(embedded_client: openai.AsyncOpenAI) -> None:
    alone = await complete(embedded_client, max_tokens=30)
    beside = [asyncio.create_task(complete(embedded_client, max_tokens=30)) for _ in range(3)]
    for bias in ({"99999999": 5, "-1": 1}, {"abc": 1}, {str(VOCAB_SIZE): 1}, {"1": 101}):
        with pytest.raises(openai.BadRequestError) as problem:
            await complete(embedded_client, logit_bias=bias)
        assert problem.value.param == "logit_bias"
    ids = {"return_token_ids": True}
    forced = await complete(embedded_client, temperature=1, logit_bias={"42": 100}, extra_body=ids)
    first_id = (await complete(embedded_client, extra_body=ids)).token_ids[0]
    banned = await complete(embedded_client, logit_bias={str(first_id): -100}, extra_body=ids)
    assert forced.token_ids == [42] * 8
    assert first_id not in banned.token_ids
    assert [(await each).text for each in beside] == [alone.text] * 3


async def test_bad_words_and_allowed_tokens_hold(embedded_client: openai.AsyncOpenAI) -> None:
    free = await complete(embedded_client)
    word = free.text.split()[0].strip(".,")
    assert word not in (await complete(embedded_client, extra_body={"bad_words": [word]})).text
    allowed = await complete(embedded_client, extra_body={"allowed_token_ids": [100, 101], "return_token_ids": True})
    assert {*allowed.token_ids} <= {100, 101}
    with pytest.raises(openai.BadRequestError) as problem:
        await complete(embedded_client, extra_body={"allowed_token_ids": [28], "bad_words": [","]})  # 28 is the comma
    assert problem.value.code == "no_token_left"


async def test_b35_only_what_follows_a_continued_message_comes_back(embedded_client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Name a fruit."}, {"role": "assistant", "content": "Fruits:\n1."}]
    answer = await embedded_client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=5, extra_body={"continue_final_message": True}
    )
    assert not (answer.choices[0].message.content or "").startswith("Fruits")
