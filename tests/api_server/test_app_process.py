"""The API server as a process: its pipes, its port, its end."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from fake_engine import FakeEngine
from http_rig import MODEL, endless, make_config, says

from octavo.api_server.child_process import ChildProcess, ProcessSpec, module_command, stop_all
from octavo.protocol.config import EngineConfig
from octavo.protocol.lifecycle import PORT_PHASE, AnyStatus, Command, ExitCode, Failed, Progress, Ready

PATIENCE_S = 30.0


class Process:
    """A started API server and what it has reported."""

    def __init__(self, child: ChildProcess) -> None:
        self.child = child
        self.statuses: list[AnyStatus] = []

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, self.statuses
            time.sleep(0.01)
            self.statuses += self.child.read_statuses()

    def all_of(self, kind: type[AnyStatus]) -> list[Any]:
        return [status for status in self.statuses if isinstance(status, kind)]

    def url(self) -> str:
        self.wait_for(lambda: self.all_of(Progress))
        first = self.all_of(Progress)[0]
        assert first.phase == PORT_PHASE
        return first.detail

    def exit_code(self) -> int:
        self.wait_for(self.child.has_ended)
        self.statuses += self.child.read_statuses()
        return self.child._process.returncode


@contextlib.contextmanager
def started(config: EngineConfig) -> Iterator[Process]:
    child = ChildProcess(ProcessSpec("api server", module_command("octavo.api_server")))
    child.launch(config)
    try:
        yield Process(child)
    finally:
        stop_all([child], 1.0)


async def status_of(url: str) -> int:
    async with aiohttp.request("GET", url) as response:
        return response.status


async def complete(url: str, max_tokens: int) -> tuple[int, Any]:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": max_tokens}
    async with aiohttp.request("POST", f"{url}/v1/completions", json=body) as response:
        return response.status, await response.json()


async def test_start_serve_drain(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    script = says("x" * 300, interval_s=0.005)
    with FakeEngine(config.engine_address, script, is_ready=False) as engine, started(config) as process:
        url = await asyncio.to_thread(process.url)
        assert await status_of(f"{url}/health") == 200
        assert await status_of(f"{url}/ready") == 503
        assert not process.all_of(Ready)
        engine.become_ready()
        await asyncio.to_thread(process.wait_for, lambda: process.all_of(Ready))
        assert await status_of(f"{url}/ready") == 200
        answer = asyncio.create_task(complete(url, 200))
        await asyncio.to_thread(process.wait_for, lambda: engine.added)
        process.child.send(Command.DRAIN)
        status, body = await answer
        assert (status, body["usage"]["completion_tokens"]) == (200, 200)
        assert await asyncio.to_thread(process.exit_code) == ExitCode.OK


async def test_a_second_drain_ends_what_runs_and_the_process(tmp_path: Path) -> None:
    config = make_config(tmp_path, max_model_len=1_000_000, drain_grace_s=60.0, drain_timeout_s=60.0)
    with FakeEngine(config.engine_address, endless) as engine, started(config) as process:
        url = await asyncio.to_thread(process.url)
        await asyncio.to_thread(process.wait_for, lambda: process.all_of(Ready))
        answer = asyncio.create_task(complete(url, 900_000))
        await asyncio.to_thread(process.wait_for, lambda: engine.added)
        process.child.send(Command.DRAIN)
        process.child.send(Command.DRAIN)
        status, body = await answer
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert await asyncio.to_thread(process.exit_code) == ExitCode.OK


def test_a_taken_port_ends_the_start_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started(make_config(tmp_path, port=port)) as process:
            assert process.exit_code() == ExitCode.PORT_TAKEN
    (failure,) = process.all_of(Failed)
    assert f"127.0.0.1:{port}" in failure.message
    assert "--port" in failure.message
    assert "\n" not in failure.message
    assert not process.all_of(Progress)


def test_an_address_that_is_not_ours_is_named(tmp_path: Path) -> None:
    with started(make_config(tmp_path, host="192.0.2.1")) as process:
        assert process.exit_code() == ExitCode.FAILURE
    (failure,) = process.all_of(Failed)
    assert "192.0.2.1" in failure.message


def test_a_missing_tokenizer_ends_the_start(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with started(config) as process:
        assert process.exit_code() == ExitCode.MODEL_NOT_FOUND
    assert "tokenizer.json" in process.all_of(Failed)[0].message


def test_the_process_imports_no_torch_and_binds_before_heavy_imports() -> None:
    program = (
        "import sys, octavo.api_server.__main__ as main\n"
        "early = {'aiohttp', 'uvloop', 'tokenizers', 'asyncio', 'jinja2'} & set(sys.modules)\n"
        "import octavo.api_server.server\n"
        "late = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "print(sorted(early), sorted(late))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output == "[] []\n"
