"""The least HTTP server around OpenVINO GenAI's continuous batching, which has none of its own in its Python package.

    VENV/bin/python tests/bench/openvino_front.py --model DIRECTORY --port PORT --threads 2

It runs in the peer's environment (aiohttp, openvino-genai, tokenizers) and knows only what the benchmark client asks
for: POST /v1/completions, streamed, greedy. The pipeline has a process of its own: a step holds the interpreter until
it is over, so in one process no text would leave and no request arrive meanwhile. What the front adds is a message of
a few bytes per token and step. Requests that come while a step runs join the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# The plugin's default where there is AMX, bfloat16, quantises no activations: their group size changes nothing. With
# float32 it does. On one core of a Xeon with AMX a step of 1 request took 21 ms so and 29 by default, of 8 36 and 60,
# of 32 57 and 73; a prompt of 220 tokens 193 and 180, among 31 others 217 and 157. Of groups of 32 (the default), 64,
# 192 and 576 values, 192 was the fastest: it divides the model's rows of 576 and 1,536.
FASTEST_PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 192}
MAX_BODY_BYTES = 2**24
SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)


class Prompt(NamedTuple):
    """What goes to the pipeline's process."""

    number: int
    token_ids: list[int]
    num_output_tokens: int
    ignores_eos: bool


class Progress(NamedTuple):
    """What comes back after a step, for each request that has new tokens or has ended."""

    number: int
    token_ids: list[int]
    has_ended: bool


class Channel:
    """Lists as lines of JSON over a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    def send(self, content: list[Any]) -> None:
        self._socket.sendall(json.dumps(content).encode() + b"\n")

    def has_line(self) -> bool:
        """Return whether `receive` will not wait."""
        while b"\n" not in self._received and select.select([self._socket], [], [], 0)[0]:
            self._read()
        return b"\n" in self._received

    def receive(self) -> list[Any]:
        """Wait for the next list; raises EOFError when the other side is gone."""
        while b"\n" not in self._received:
            self._read()
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _read(self) -> None:
        data = self._socket.recv(2**16)
        if not data:
            raise EOFError
        self._received += data


def run_pipeline(args: argparse.Namespace) -> None:
    """Step until the front is gone: the main function of the pipeline's process."""
    import openvino_genai

    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    channel = Channel(socket.socket(fileno=args.pipeline))
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = args.cache_gib
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": args.threads, **FASTEST_PROPERTIES}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(args.model), scheduler, "CPU", properties)
    live: dict[int, Any] = {}
    while True:
        while not live or channel.has_line():
            prompt = Prompt(*channel.receive())
            live[prompt.number] = add(pipeline, prompt)
        pipeline.step()
        found = [progress(number, handle) for number, handle in live.items()]
        for one in found:
            if one.has_ended:
                del live[one.number]
        channel.send([one for one in found if one.token_ids or one.has_ended])


def add(pipeline: Any, prompt: Prompt) -> Any:
    """Hand a request to the pipeline; return its handle."""
    import numpy
    import openvino
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = prompt.num_output_tokens
    config.ignore_eos = prompt.ignores_eos
    config.do_sample = False
    token_ids = openvino.Tensor(numpy.array([prompt.token_ids], dtype=numpy.int64))
    return pipeline.add_request(prompt.number, token_ids, config)


def progress(number: int, handle: Any) -> Progress:
    """Return the tokens that a request got since the last look."""
    token_ids: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            token_ids.extend(output.generated_ids)
    return Progress(number, token_ids, handle.get_status().name != "RUNNING")


@dataclass
class Generation:
    """A request on its way: new tokens arrive in `tokens`, None after the last."""

    prompt: Prompt
    tokens: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)


class Engine:
    """The pipeline's process, as the front sees it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, *sys.argv, "--pipeline", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._channel = Channel(ours)
        self._live: dict[int, Generation] = {}
        self._num_seen = 0
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        threading.Thread(target=self._receive, daemon=True).start()

    def add(self, token_ids: list[int], num_output_tokens: int, ignores_eos: bool) -> Generation:
        self._num_seen += 1
        generation = Generation(Prompt(self._num_seen, token_ids, num_output_tokens, ignores_eos))
        self._live[self._num_seen] = generation
        self._channel.send(list(generation.prompt))
        return generation

    def _receive(self) -> None:
        try:
            while True:
                found = [Progress(*one) for one in self._channel.receive()]
                self._loop.call_soon_threadsafe(self._hand_out, found)
        except EOFError:
            self._loop.call_soon_threadsafe(self.ended.set)

    def _hand_out(self, found: list[Progress]) -> None:
        for one in found:
            tokens = self._live[one.number].tokens
            if one.token_ids:
                tokens.put_nowait(one.token_ids)
            if one.has_ended:
                tokens.put_nowait(None)
                del self._live[one.number]


class Front:
    """Text in, events out."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        token_ids = self._tokenizer.encode(body["prompt"]).ids
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        generation = self._engine.add(token_ids, body["max_tokens"], body.get("ignore_eos", False))
        async for event in self._events(generation):
            await response.write(event)
        return response

    async def _events(self, generation: Generation) -> AsyncIterator[bytes]:
        decoder, num_tokens = DecodeStream(skip_special_tokens=False), 0
        while (tokens := await generation.tokens.get()) is not None:
            num_tokens += len(tokens)
            text = "".join(decoder.step(self._tokenizer, token) or "" for token in tokens)
            yield _event({"choices": [{"index": 0, "text": text}]})
        reason = "length" if num_tokens == generation.prompt.num_output_tokens else "stop"
        usage = {"prompt_tokens": len(generation.prompt.token_ids), "completion_tokens": num_tokens}
        yield _event({"choices": [{"index": 0, "text": "", "finish_reason": reason}], "usage": usage})
        yield b"data: [DONE]\n\n"


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


async def serve(args: argparse.Namespace) -> None:
    """Serve until the process is ended, or the pipeline's is."""
    engine = Engine()
    front = Front(engine, Tokenizer.from_file(str(args.model / "tokenizer.json")))
    application = web.Application(client_max_size=MAX_BODY_BYTES)
    application.add_routes([web.post("/v1/completions", front.complete)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", args.port).start()
    await engine.ended.wait()
    raise SystemExit("the pipeline's process has ended")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, help="directory with the exported model and tokenizer.json"
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="threads of the pipeline")
    parser.add_argument("--cache-gib", type=int, default=2, help="size of the KV cache")
    parser.add_argument("--pipeline", type=int, help="be the pipeline's process, and talk over this descriptor")
    args = parser.parse_args()
    if args.pipeline is None:
        asyncio.run(serve(args))
    else:
        run_pipeline(args)


if __name__ == "__main__":
    main()
