"""The whole pipeline through real processes and sockets, with the oracle as worker: every answer is known before."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from oracle import expected_output
from server_process import ORACLE_ARGUMENTS, ServerProcess

from octavo.api_server.generation.output_processor import OutputProcessor
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.engine_messages import FinishReason
from octavo.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN = 49152, (2,), 512
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def tokenizer(smollm2_directory: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.load(str(smollm2_directory))
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def server(smollm2_directory: Path) -> Iterator[ServerProcess]:
    """A pool for about four of the requests below, so that they are preempted all the time."""
    limits = ("--max-model-len", str(MAX_MODEL_LEN), "--block-size", "4", "--num-device-blocks", "160")
    steps = ("--max-num-seqs", "16", "--max-num-batched-tokens", "48", "--max-tokens-per-request", "20")
    with ServerProcess(MODEL, *ORACLE_ARGUMENTS, *limits, *steps) as server:
        yield server


@pytest.fixture
async def client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        yield client


async def metric(server: ServerProcess, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as answer:
        found = re.search(rf"^{re.escape(name)} (\S+)$", await answer.text(), re.MULTILINE)
    assert found, name
    return float(found[1])


async def wait_for_metric(server: ServerProcess, name: str, value: float) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await metric(server, name) != value:  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.02)


def expected(
    tokenizer: Tokenizer, prompt: str, params: SamplingParams, stop: tuple[str, ...] = ()
) -> tuple[str, FinishReason | None, int]:
    """Return text, finish reason and number of output tokens that must come out."""
    prompt_token_ids = tokenizer.encode(prompt)
    token_ids, finish_reason = expected_output(prompt_token_ids, params, VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN)
    stop_token_id = token_ids[-1] if finish_reason is FinishReason.STOP else None
    processor = OutputProcessor(tokenizer, prompt_token_ids, stop, params)
    (event,) = processor.process(token_ids, finish_reason, stop_token_id)
    return event.content, event.ending.finish_reason, processor.num_output_tokens


def random_prompt(source: random.Random) -> str:
    return " ".join(
        source.choice(["block", "table", "token", "queue", "swap", "héllo"]) for _ in range(source.randint(1, 60))
    )


async def streamed(client: openai.AsyncOpenAI, arguments: dict[str, Any]) -> tuple[str, str | None, int]:
    text, finish_reason, num_tokens = "", None, 0
    stream = await client.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            finish_reason = choice.finish_reason or finish_reason
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    return text, finish_reason, num_tokens


async def whole(client: openai.AsyncOpenAI, arguments: dict[str, Any]) -> tuple[str, str | None, int]:
    answer = await client.completions.create(**arguments)
    assert answer.usage is not None
    return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens


@pytest.mark.parametrize("seed", range(3))
async def test_many_at_once_each_get_their_own_answer(
    client: openai.AsyncOpenAI, server: ServerProcess, tokenizer: Tokenizer, seed: int
) -> None:
    source = random.Random(seed)
    jobs = []
    for index in range(48):
        prompt, temperature = random_prompt(source), source.choice([0.0, 1.0])
        params = SamplingParams(
            max_tokens=source.randint(1, 120),
            min_tokens=source.choice([0, 1]),
            temperature=temperature,
            seed=source.randrange(2**63),
            ignore_eos=source.random() < 0.5,
        )
        arguments = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            "temperature": temperature,
            "seed": params.seed,
            "extra_body": {"ignore_eos": params.ignore_eos, "min_tokens": params.min_tokens},
        }
        jobs.append((prompt, params, arguments, streamed if index % 2 else whole))
    answers = await asyncio.gather(*(ask(client, arguments) for _, _, arguments, ask in jobs))
    for (prompt, params, _, _), answer in zip(jobs, answers, strict=True):
        assert answer == expected(tokenizer, prompt, params)
    assert await metric(server, "octavo_preemptions_total") > 0, "the pool was not small enough to prove anything"
    await wait_for_metric(server, "octavo_kv_usage_ratio", 0)


async def test_b22_greedy_neighbours_do_not_change_seeded_requests(
    client: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    seeded = [
        {"model": MODEL, "prompt": f"story {i}", "max_tokens": 40, "temperature": 1.0, "seed": i} for i in range(4)
    ]
    greedy = [{"model": MODEL, "prompt": f"fact {i}", "max_tokens": 40, "temperature": 0.0} for i in range(20)]
    alone = [await whole(client, arguments) for arguments in seeded]
    together = await asyncio.gather(*(whole(client, arguments) for arguments in [*seeded, *greedy]))
    assert together[:4] == alone
    assert alone[0] == expected(tokenizer, "story 0", SamplingParams(max_tokens=40, temperature=1.0, seed=0))


async def test_stop_strings_end_the_request_in_the_engine(
    client: openai.AsyncOpenAI, server: ServerProcess, tokenizer: Tokenizer
) -> None:
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    text, _, _ = expected(tokenizer, "stop", params)
    stop = text[10:16]
    arguments = {
        "model": MODEL,
        "prompt": "stop",
        "max_tokens": 100,
        "temperature": 0.0,
        "stop": [stop],
        "extra_body": {"ignore_eos": True},
    }
    for ask in (streamed, whole):
        assert await ask(client, arguments) == expected(tokenizer, "stop", params, (stop,))
    await wait_for_metric(server, "octavo_running_requests", 0)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_b42_requests_of_clients_that_left_are_aborted(server: ServerProcess, is_stream: bool) -> None:
    aborted = await metric(server, 'octavo_finished_requests_total{reason="abort"}')
    body = {"model": MODEL, "prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": is_stream, "n": 30}
    async with aiohttp.ClientSession() as session:
        with pytest.raises(asyncio.TimeoutError):
            async with session.post(
                f"{server.url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=0.3)
            ) as answer:
                await answer.read()
    await wait_for_metric(server, "octavo_running_requests", 0)
    await wait_for_metric(server, "octavo_waiting_requests", 0)
    await wait_for_metric(server, "octavo_kv_usage_ratio", 0)
    assert await metric(server, 'octavo_finished_requests_total{reason="abort"}') > aborted
    generated = await metric(server, "octavo_generation_tokens_total")
    await asyncio.sleep(0.3)
    assert await metric(server, "octavo_generation_tokens_total") == generated


async def test_a_request_that_can_never_fit_is_refused_with_the_numbers(smollm2_directory: Path) -> None:
    with ServerProcess(MODEL, *ORACLE_ARGUMENTS, "--num-device-blocks", "4") as small:
        async with openai.AsyncOpenAI(base_url=f"{small.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
            for is_stream in (False, True):
                with pytest.raises(openai.BadRequestError, match=r"blocks of 16 tokens, and there are 4"):
                    await client.completions.create(model=MODEL, prompt="x", max_tokens=80, stream=is_stream)
            answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=20)
            assert answer.choices[0].finish_reason in ("stop", "length")


def test_openai_python_without_asyncio(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        arguments = {"model": MODEL, "messages": messages, "max_tokens": 30, "seed": 5, "n": 2}
        answer = client.chat.completions.create(**arguments)
        texts = ["", ""]
        for chunk in client.chat.completions.create(**arguments, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in answer.choices]
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="nope", messages=messages)
        assert caught.value.code == "model_not_found"
