"""An API server with real sockets and a fake engine, in the test's own event loop; and a tiny tokenizer for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import tokenizers
from fake_engine import FakeEngine, Script
from tokenizers import decoders, models, pre_tokenizers

from octavo.api_server.api_keys import load_api_keys
from octavo.api_server.server import ApiServer
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.config import ApiConfig, EngineConfig, ModelConfig, SchedulerConfig, WeightsFormat
from octavo.protocol.engine_messages import AddRequest

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 258
VOCAB_SIZE = 259
MAX_MODEL_LEN = 512
MODEL = "tiny"


def write_tokenizer(directory: Path) -> str:
    """Write a byte-level tokenizer, one token per byte, with a chat template; return the directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


def make_config(
    directory: Path, max_model_len: int = MAX_MODEL_LEN, scheduler: SchedulerConfig | None = None, **api: Any
) -> EngineConfig:
    options = {"port": 0, "drain_grace_s": 0.05, "drain_timeout_s": 5.0, **api}
    path = write_tokenizer(directory)
    model = ModelConfig(
        path=path,
        weights_path=path,
        weights_format=WeightsFormat.SAFETENSORS,
        served_model_names=(MODEL, "org/alias"),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS_ID,),
    )
    return EngineConfig(
        model=model,
        ipc_directory=str(directory),
        api=ApiConfig(**options),
        scheduler=scheduler or SchedulerConfig(max_num_seqs=4),
    )


class Rig:
    """One running server and what a test needs of it."""

    def __init__(self, config: EngineConfig, engine: FakeEngine, url: str, server: ApiServer, tokenizer: Tokenizer):
        self.config = config
        self.engine = engine
        self.url = url
        self.server = server
        self.tokenizer = tokenizer
        self.session = aiohttp.ClientSession(url)
        self.life: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """POST JSON, or bytes as they are; return the status and the decoded answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = options.pop("headers", {"Content-Type": "application/json"})
        async with self.session.post(path, data=data, headers=headers, **options) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def complete(self, prompt: Any = "Hi", **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    async def chat(self, text: str = "Hi", **fields: Any) -> tuple[int, Any]:
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})

    async def stream(self, path: str, **fields: Any) -> list[Any]:
        """POST a streamed request; return the data of its events, JSON decoded but for [DONE]."""
        subject = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
        body = {"model": MODEL, "stream": True, **subject, **fields}
        async with self.session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = (await response.read()).decode()
        return parse_events(text)

    async def metric(self, name: str) -> float:
        async with self.session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait for `condition`, which must come true."""
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - what is waited for happens in another thread
                await asyncio.sleep(0.005)


def parse_events(text: str) -> list[Any]:
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") for event in events)
    data = [event.removeprefix("data: ") for event in events]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def says(text: str, **options: Any) -> Callable[[AddRequest], Script]:
    """A script in which every request gets `text`, one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoded = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    token_ids = [alphabet.index(char) for piece, _ in encoded for char in piece]
    return lambda request: Script(token_ids, **options)


def endless(request: AddRequest) -> Script:
    """Goes on until it is aborted."""
    return Script([40] * 1_000_000, interval_s=0.002)


def silent(request: AddRequest) -> Script:
    """Is queued for ever."""
    return Script([], finish_reason=None)


@contextlib.asynccontextmanager
async def running(
    directory: Path,
    script: Callable[[AddRequest], Script],
    is_ready: bool = True,
    config: EngineConfig | None = None,
    send_buffer_bytes: int | None = None,
    **api: Any,
) -> AsyncIterator[Rig]:
    """A server that listens, and is ready unless told otherwise."""
    config = config or make_config(directory, **api)
    tokenizer = Tokenizer.load(config.model.path)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    if send_buffer_bytes is not None:  # connections inherit it
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with FakeEngine(config.engine_address, script, is_ready) as engine:
        key_file = config.api.api_key_file
        server = ApiServer(config, 0, tokenizer, None if key_file is None else load_api_keys(key_file))
        ready = asyncio.Event()
        life = asyncio.create_task(server.run(listening, ready.set))
        rig = Rig(config, engine, url, server, tokenizer)
        rig.life = life
        try:
            if is_ready:
                async with asyncio.timeout(10):
                    await ready.wait()
            yield rig
        finally:
            await rig.session.close()
            server.drain()
            server.drain()
            async with asyncio.timeout(10):
                await life
            tokenizer.close()
