"""The least HTTP server around OpenVINO GenAI's continuous batching, which has none of its own in its Python package.

    VENV/bin/python tests/bench/openvino_front.py --model DIRECTORY --port PORT --threads 2

It runs in the peer's environment (aiohttp, openvino-genai, tokenizers) and knows only what the benchmark client asks
for: POST /v1/completions, streamed, greedy. The pipeline steps in a thread of its own and holds the interpreter only
between steps, so the front costs what a front in C++ would, a few hundred microseconds a step with 32 requests.
Requests that come while a step runs join the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import openvino
import openvino_genai
from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MAX_BODY_BYTES = 2**24


@dataclass
class Generation:
    """A request on its way: new tokens arrive in `tokens`, None after the last."""

    prompt_ids: list[int]
    num_output_tokens: int
    ignores_eos: bool
    tokens: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)


class Engine:
    """Owns the pipeline; all calls of it happen in one thread."""

    def __init__(self, model: Path, num_threads: int, cache_gib: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": num_threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)
        self._arrivals: queue.SimpleQueue[Generation] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, generation: Generation) -> None:
        self._arrivals.put(generation)

    def _run(self) -> None:
        live: list[tuple[openvino_genai.py_openvino_genai.GenerationHandle, Generation]] = []
        num_seen = 0
        while True:
            arrived = [] if live else [self._arrivals.get()]
            while not self._arrivals.empty():
                arrived.append(self._arrivals.get())
            for generation in arrived:
                num_seen += 1
                live.append((self._start(num_seen, generation), generation))
            self._pipeline.step()
            fresh = [(generation, _read(handle)) for handle, generation in live]
            ended = [_has_ended(handle) for handle, _ in live]
            self._loop.call_soon_threadsafe(_hand_out, fresh, ended)
            live = [pair for pair, has_ended in zip(live, ended, strict=True) if not has_ended]

    def _start(self, number: int, generation: Generation) -> openvino_genai.py_openvino_genai.GenerationHandle:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = generation.num_output_tokens
        config.ignore_eos = generation.ignores_eos
        config.do_sample = False
        prompt = openvino.Tensor(np.array([generation.prompt_ids], dtype=np.int64))
        return self._pipeline.add_request(number, prompt, config)


def _read(handle: openvino_genai.py_openvino_genai.GenerationHandle) -> list[int]:
    """Return the tokens made since the last look."""
    tokens: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            tokens.extend(output.generated_ids)
    return tokens


def _has_ended(handle: openvino_genai.py_openvino_genai.GenerationHandle) -> bool:
    return handle.get_status() != openvino_genai.py_openvino_genai.GenerationStatus.RUNNING


def _hand_out(fresh: list[tuple[Generation, list[int]]], ended: list[bool]) -> None:
    for (generation, tokens), has_ended in zip(fresh, ended, strict=True):
        if tokens:
            generation.tokens.put_nowait(tokens)
        if has_ended:
            generation.tokens.put_nowait(None)


class Front:
    """Text in, events out."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt_ids = self._tokenizer.encode(body["prompt"]).ids
        generation = Generation(prompt_ids, body["max_tokens"], body.get("ignore_eos", False))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._engine.add(generation)
        async for event in self._events(generation):
            await response.write(event)
        return response

    async def _events(self, generation: Generation) -> AsyncIterator[bytes]:
        decoder, num_tokens = DecodeStream(skip_special_tokens=False), 0
        while (tokens := await generation.tokens.get()) is not None:
            num_tokens += len(tokens)
            text = "".join(decoder.step(self._tokenizer, token) or "" for token in tokens)
            yield _event({"choices": [{"index": 0, "text": text}]})
        reason = "length" if num_tokens == generation.num_output_tokens else "stop"
        usage = {"prompt_tokens": len(generation.prompt_ids), "completion_tokens": num_tokens}
        yield _event({"choices": [{"index": 0, "text": "", "finish_reason": reason}], "usage": usage})
        yield b"data: [DONE]\n\n"


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def serve(args: argparse.Namespace) -> None:
    """Serve until the process is ended."""
    engine = Engine(args.model, args.threads, args.cache_gib)
    front = Front(engine, Tokenizer.from_file(str(args.model / "tokenizer.json")))
    application = web.Application(client_max_size=MAX_BODY_BYTES)
    application.add_routes([web.post("/v1/completions", front.complete)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", args.port).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, help="directory with the exported model and tokenizer.json"
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="threads of the pipeline")
    parser.add_argument("--cache-gib", type=int, default=2, help="size of the KV cache")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
