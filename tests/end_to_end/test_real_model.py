"""The embedded model behind the real processes: real questions, real answers, many at once."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
NUM_STREAMS = 64


async def completion(client: openai.AsyncOpenAI, **arguments: Any) -> str:
    answer = await client.completions.create(model=MODEL, **arguments)
    return answer.choices[0].text


async def streamed_completion(client: openai.AsyncOpenAI, **arguments: Any) -> str:
    stream = await client.completions.create(model=MODEL, stream=True, **arguments)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_the_capital_of_france(embedded_client: openai.AsyncOpenAI) -> None:
    answer = await embedded_client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


async def test_b03_a_streamed_chat_that_ends_by_itself_says_stop(embedded_client: openai.AsyncOpenAI) -> None:
    stream = await embedded_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 2 + 2? Answer with one number."}],
        temperature=0,
        max_tokens=200,
        stream=True,
    )
    reasons = [choice.finish_reason async for chunk in stream for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["stop"]


async def test_many_streams_at_once_say_what_each_says_alone(embedded_client: openai.AsyncOpenAI) -> None:
    jobs = [
        {
            "prompt": f"Fact number {index}: the {noun}",
            "max_tokens": 6,
            "temperature": index % 2,
            "seed": index,
            "extra_body": {"ignore_eos": True},
        }
        for index, noun in enumerate(
            ("sun", "moon", "tree", "river", "house", "book", "horse", "cloud") * (NUM_STREAMS // 8)
        )
    ]
    together = await asyncio.gather(*(streamed_completion(embedded_client, **job) for job in jobs))
    alone = [await completion(embedded_client, **job) for job in jobs]
    assert together == alone


async def test_b01_a_stop_string_inside_tokens_cuts_before_it(embedded_client: openai.AsyncOpenAI) -> None:
    arguments = {"prompt": "Alphabet: ABC", "temperature": 0, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    text = await completion(embedded_client, **arguments)
    for first in range(3, 20, 4):
        stop = text[first : first + 6]
        kept = text[: text.index(stop)]
        assert await completion(embedded_client, **arguments, stop=[stop]) == kept
        assert await streamed_completion(embedded_client, **arguments, stop=[stop]) == kept


async def test_b09_min_tokens_holds_back_a_stop_string(embedded_client: openai.AsyncOpenAI) -> None:
    arguments: dict[str, Any] = {"prompt": "1 2 3 4 5", "temperature": 0, "max_tokens": 20, "stop": [" "]}
    for is_stream in (False, True):
        answer = await embedded_client.completions.create(
            model=MODEL,
            **arguments,
            stream=is_stream,
            extra_body={"min_tokens": 10},
            **({"stream_options": {"include_usage": True}} if is_stream else {}),
        )
        usage = [chunk.usage async for chunk in answer][-1] if is_stream else answer.usage
        assert usage.completion_tokens >= 10


async def test_b13_garbage_at_high_temperature_is_valid_text(embedded_client: openai.AsyncOpenAI) -> None:
    answers = await asyncio.gather(
        *(
            completion(
                embedded_client,
                prompt="x",
                temperature=5,
                top_p=1,
                max_tokens=60,
                seed=seed,
                extra_body={"top_k": 0, "ignore_eos": True},
            )
            for seed in range(1, 17)
        )
    )
    assert len(set(answers)) == len(answers)
    for answer in answers:
        answer.encode("utf-8")  # a lone surrogate would raise


async def test_the_same_seed_gives_the_same_text_and_another_one_another(embedded_client: openai.AsyncOpenAI) -> None:
    arguments: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 1, "max_tokens": 24}
    first, again, other = [await completion(embedded_client, **arguments, seed=seed) for seed in (7, 7, 8)]
    assert first == again != other


async def test_health_answers_while_the_model_is_busy(
    embedded_server: ServerProcess, embedded_client: openai.AsyncOpenAI
) -> None:
    busy = asyncio.gather(
        *(completion(embedded_client, prompt=f"Busy {index}", max_tokens=16) for index in range(NUM_STREAMS // 2))
    )
    async with aiohttp.ClientSession() as session:
        num_answers = 0
        while not busy.done():
            async with session.get(f"{embedded_server.url}/health") as answer:
                assert answer.status == 200
            num_answers += 1
            await asyncio.sleep(0.01)
    assert num_answers > 10
    assert len(await busy) == NUM_STREAMS // 2
