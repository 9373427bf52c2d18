"""Two CPU workers that share the embedded model say what one says; when one of them dies, nothing is left."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from server_process import ServerProcess

from octavo.protocol.lifecycle import ExitCode

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
PATIENCE_S = 300.0
ARGUMENTS = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory", "256MiB", "--device", "cpu")
TWO_WORKERS = ("--tensor-parallel-size", "2")
GREEDY = {"temperature": 0, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
JOBS: list[dict[str, Any]] = [
    {"prompt": "The", **GREEDY},
    {"prompt": "The capital of France is", **GREEDY},
    {"prompt": "1, 2, 3, 4, 5, 6,", **GREEDY, "max_tokens": 40},
    {"prompt": "A short history of the printing press. " * 9, **GREEDY},
    {"prompt": "Once upon a time there was a small red fox who lived near the", **GREEDY},
    {"prompt": "Ünïcödé wörks töö: çà et là, naïve café – ", **GREEDY},
    {"prompt": "Fact number one: the sun", "temperature": 1, "seed": 3, "max_tokens": 16},
    {"prompt": "Fact number two: the moon", "temperature": 0.7, "top_p": 0.9, "seed": 4, "n": 2, "max_tokens": 16},
]


async def answers(url: str) -> list[list[str]]:
    """Ask everything at once; return the texts of each request's choices."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        results = await asyncio.gather(*(client.completions.create(model=MODEL, **job) for job in JOBS))
    return [[choice.text for choice in result.choices] for result in results]


def test_two_workers_say_what_one_says(smollm2_gguf: Path) -> None:
    texts = []
    for arguments in ((), TWO_WORKERS):
        with ServerProcess(MODEL, *ARGUMENTS, "--threads", "1", *arguments) as server:
            texts.append(asyncio.run(answers(server.url)))
    assert texts[0] == texts[1]
    assert "Paris" in texts[1][1][0]
    assert len({text for choices in texts[1] for text in choices}) == len(JOBS) + 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_dies_in_a_step_leaves_nothing(smollm2_gguf: Path, rank: int) -> None:
    """The other one waits for it inside a collective, and must not do so for ever."""
    server = ServerProcess(MODEL, *ARGUMENTS, "--threads", "1", *TWO_WORKERS)
    try:
        server.wait_ready()
        body = json.dumps({"model": MODEL, "prompt": "One", "max_tokens": 400, "ignore_eos": True, "stream": True})
        request = urllib.request.Request(f"{server.url}/v1/completions", body.encode())  # noqa: S310 - our own URL
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:  # noqa: S310 - our own URL
            assert answer.readline().startswith(b"data: ")
            server.process_called(f"worker {rank}").kill()
            assert server.wait() == ExitCode.PROCESS_DIED
        server.assert_nothing_is_left()
    finally:
        server.destroy()
