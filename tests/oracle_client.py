"""Asks a server whose worker is the oracle, and knows the right answer: for tests through real processes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from http_rig import parse_events
from oracle import expected_output
from oracle_beams import expected_beams

from octavo.api_server.generation.output_processor import OutputProcessor
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.engine_messages import BeamSearchParams, FinishReason
from octavo.protocol.sampling_params import SamplingParams

MODEL = "smollm2-135m"
VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN = 49152, (2,), 512
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Choice:
    """What a client gets of one choice."""

    text: str
    finish_reason: str | None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Answer:
    """What a client gets of one HTTP request."""

    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


class OracleClient:
    """A context manager around a session with one server."""

    def __init__(self, url: str, **headers: str) -> None:
        self.session = aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout(total=PATIENCE_S))

    async def __aenter__(self) -> OracleClient:
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self.session.close()

    async def post(self, prompt: Any, headers: dict[str, str] | None = None, **fields: Any) -> tuple[int, Any, str]:
        """Return status, decoded answer and the X-Request-Id that came with it."""
        body = {"model": MODEL, "prompt": prompt, **fields}
        async with self.session.post("/v1/completions", json=body, headers=headers) as response:
            text = await response.text()
            answer = parse_events(text) if fields.get("stream") and response.status == 200 else json.loads(text)
            return response.status, answer, response.headers["X-Request-Id"]

    async def whole(self, prompt: Any, **fields: Any) -> Answer:
        status, answer, _ = await self.post(prompt, **fields)
        assert status == 200, answer
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
        choices = (Choice(each["text"], each["finish_reason"], each.get("stop_reason")) for each in answer["choices"])
        return _answer(tuple(choices), answer["usage"])

    async def streamed(self, prompt: Any, **fields: Any) -> Answer:
        options = {"include_usage": True}
        status, events, _ = await self.post(prompt, **fields, stream=True, stream_options=options)
        assert status == 200, events
        assert events[-1] == "[DONE]"
        texts: dict[int, str] = {}
        endings: dict[int, Choice] = {}
        for choice in (choice for event in events[:-1] for choice in event["choices"]):
            index = choice["index"]
            assert index not in endings, "a choice goes on after its end"
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"] is not None:
                endings[index] = Choice(texts[index], choice["finish_reason"], choice.get("stop_reason"))
        assert endings.keys() == texts.keys()
        return _answer(tuple(endings[index] for index in range(len(endings))), events[-2]["usage"])

    async def metric(self, name: str) -> float:
        async with self.session.get("/metrics") as response:
            found = re.search(rf"^{re.escape(name)} (\S+)$", await response.text(), re.MULTILINE)
        assert found, name
        return float(found[1])

    async def until(self, name: str, value: float) -> None:
        """Wait until a metric has this value."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.metric(name) != value:  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(0.01)

    async def until_quiet(self) -> None:
        """Wait until no request holds anything."""
        for name in ("octavo_running_requests", "octavo_waiting_requests", "octavo_used_host_blocks"):
            await self.until(name, 0)
        assert await self.metric("octavo_kv_usage_ratio") == 0


def _answer(choices: tuple[Choice, ...], usage: Any) -> Answer:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(choices, usage["prompt_tokens"], usage["completion_tokens"], cached)


def expected_choice(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
) -> tuple[Choice, int]:
    """Return the choice that must come out, and the number of its output tokens."""
    token_ids, reason = expected_output(prompt_token_ids, params, VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN)
    return _choice(tokenizer, prompt_token_ids, params, token_ids, reason), len(token_ids)


def expected_beam_choices(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams, search: BeamSearchParams
) -> tuple[tuple[Choice, ...], int]:
    """Return the beams that must come out, best first, and the number of all their output tokens."""
    limits = (VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN)
    outputs = [output for output, _ in expected_beams(prompt_token_ids, params, search, *limits)]
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else EOS_TOKEN_IDS)}
    choices = []
    for output in outputs:
        reason = FinishReason.STOP if output[-1] in ending else FinishReason.LENGTH
        choices.append(_choice(tokenizer, prompt_token_ids, params, output, reason))
    return tuple(choices), sum(map(len, outputs))


def _choice(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    token_ids: Sequence[int],
    reason: FinishReason,
) -> Choice:
    stop_token_id = token_ids[-1] if reason is FinishReason.STOP else None
    processor = OutputProcessor(tokenizer, prompt_token_ids, (), params)
    (event,) = processor.process(token_ids, reason, stop_token_id)
    return Choice(event.content, *event.ending)
