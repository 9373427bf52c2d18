"""The life and death of real instances, with the oracle as their worker: nothing of ours outlives an ending."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from server_process import ORACLE_ARGUMENTS, ServerProcess

from octavo.protocol.lifecycle import ExitCode

pytestmark = pytest.mark.model

TITLES = ("api_server", "engine_core", "oracle_worker", "supervisor")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Servers:
    """Starts servers for one test."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.started: list[ServerProcess] = []

    def start(self, *arguments: str) -> ServerProcess:
        server = ServerProcess(self.model, *ORACLE_ARGUMENTS, "--num-device-blocks", "1024", *arguments)
        self.started.append(server)
        return server


@pytest.fixture
def servers(smollm2_gguf: Path) -> Iterator[Servers]:
    found = Servers(smollm2_gguf)
    yield found
    for server in found.started:
        server.destroy()


class Stream(threading.Thread):
    """A streamed completion in the background; `answer` and `problem` say how it ended."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        body = {"prompt": "x", "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        self.request = urllib.request.Request(  # noqa: S310 - our own URL
            f"{url}/v1/completions",
            json.dumps({"model": "SmolLM2-135M-Instruct.Q4_1", **body}).encode(),
            {"Content-Type": "application/json"},
        )
        self.has_begun = threading.Event()
        self.answer = b""
        self.problem: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self.request, timeout=60) as response:  # noqa: S310 - our own URL
                while part := response.read1(65536):
                    self.answer += part
                    self.has_begun.set()
        except (OSError, http.client.HTTPException) as problem:
            self.problem = problem
        self.has_begun.set()


def test_ready_answers_and_ends(servers: Servers) -> None:
    server = servers.start()
    server.wait_ready()
    for title in TITLES:
        server.process_called(title)
    assert server.stop() == ExitCode.OK
    assert "Traceback" not in server.stderr


@pytest.mark.parametrize("victim", TITLES)
def test_b60_kill_minus_nine_of_any_process_leaves_nothing(servers: Servers, victim: str) -> None:
    port = free_port()
    server = servers.start("--port", str(port))
    server.wait_ready()
    stream = Stream(server.url, 100_000)
    stream.has_begun.wait()
    server.process_called(victim).kill()
    server.wait()
    server.assert_nothing_is_left()
    if victim != "supervisor":
        assert server.process.returncode == ExitCode.PROCESS_DIED
        assert f"the {victim.removeprefix('oracle_').replace('_', ' ')} process" in server.stderr
    again = servers.start("--port", str(port))
    again.wait_ready()
    assert again.stop() == ExitCode.OK


@pytest.mark.parametrize("seed", range(4))
def test_b60_kill_minus_nine_in_any_order(servers: Servers, seed: int) -> None:
    port = free_port()
    server = servers.start("--port", str(port))
    server.wait_ready()
    rng = random.Random(seed)
    processes = server.living()
    rng.shuffle(processes)
    for process in processes[: rng.randint(2, 4)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # another's death took it along
            process.kill()
        time.sleep(rng.choice([0, 0.01, 0.1]))
    server.wait()
    again = servers.start("--port", str(port))
    again.wait_ready()
    assert not server.living()
    assert again.stop() == ExitCode.OK


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_b60_a_signal_at_any_moment_of_the_start(servers: Servers, number: signal.Signals) -> None:
    for seed in range(8):
        server = servers.start("--drain-grace", "0")
        time.sleep(random.Random(seed).uniform(0, 2))
        server.send(number)
        status = server.wait()
        assert status in (ExitCode.OK, -number), server.stderr
        server.assert_nothing_is_left()
        assert "octavo: error" not in server.stderr


def test_b60_sigterm_lets_running_requests_finish(servers: Servers) -> None:
    server = servers.start("--drain-grace", "0")
    server.wait_ready()
    stream = Stream(server.url, 2000)
    stream.has_begun.wait()
    assert server.stop(signal.SIGTERM) == ExitCode.OK
    stream.join()
    assert stream.problem is None
    assert stream.answer.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in stream.answer


def test_b60_a_second_sigterm_only_shortens_the_drain(servers: Servers) -> None:
    server = servers.start("--drain-timeout", "600", "--drain-grace", "0")
    server.wait_ready()
    stream = Stream(server.url, 8000)
    stream.has_begun.wait()
    server.send(signal.SIGTERM)
    time.sleep(0.2)
    assert server.process.poll() is None
    assert server.stop(signal.SIGTERM) == ExitCode.OK
    stream.join()
    assert stream.problem is None  # it got its last word, not a broken connection
    assert stream.answer.endswith(b"\n\n")


def test_a_taken_port_is_told_before_anything_is_loaded(servers: Servers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = servers.start("--port", str(port))
        assert server.wait() == ExitCode.PORT_TAKEN
        server.assert_nothing_is_left()
    assert f"octavo: error: 127.0.0.1:{port} is already in use" in server.stderr
    assert "kv blocks" not in server.stderr


def test_two_instances_side_by_side(servers: Servers) -> None:
    first, second = servers.start(), servers.start()
    first.wait_ready()
    second.wait_ready()
    assert first.url != second.url
    assert first.stop() == ExitCode.OK
    assert second.is_ready()
    assert second.stop() == ExitCode.OK
