"""Starts a server, says when it gave its first token, and ends it with all that it started.

Nothing is ended but descendants of the process started here, each identified by its id and start time. Should the
benchmark itself be killed, the kernel ends the server (its parent-death signal).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from peer_install import PeerError, last_line
from peer_servers import Server
from server_watch import cpu_seconds, watch_processes

from octavo.api_server.client.load_client import Target, complete, new_session
from octavo.api_server.client.workloads import Request

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.05
FIRST_REQUEST = Request("Hello", num_prompt_tokens=1, num_output_tokens=1, arrival_s=0.0)
SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class RunningServer:
    """A server that has given its first token, `cold_start_s` after its command."""

    target: Target
    pid: int
    cold_start_s: float


@dataclass(frozen=True)
class RestingServer:
    """What a server takes while nobody asks for anything. `idle_cpu` is a fraction of one core."""

    pss_bytes: int | None
    idle_cpu: float


@asynccontextmanager
async def running(server: Server, concurrency: int, log: Path) -> AsyncIterator[RunningServer]:
    """Start a server for so many requests at once; it is gone afterwards. Raises PeerError when it does not answer."""
    port = free_port()
    command = server.command_for(port, concurrency)
    started_s = time.perf_counter()
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment_of(server),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    target = Target(f"http://127.0.0.1:{port}", server.model, server.label, process.pid,
                    length_control=server.length_control, ends_with_done=server.ends_with_done)  # fmt: skip
    try:
        await wait_for_first_token(target, process, log)
        yield RunningServer(target, process.pid, time.perf_counter() - started_s)
    finally:
        await end(process)


def environment_of(server: Server) -> dict[str, str]:
    """Return ours and the server's: without our number of threads, and no module comes from our working directory."""
    ours = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**ours, "PYTHONSAFEPATH": "1", **server.environment}


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with_parent() -> None:
    LIBC.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


async def wait_for_first_token(target: Target, process: asyncio.subprocess.Process, log: Path) -> None:
    """Ask until the server answers. Raises PeerError when it ends or takes too long."""
    problem: str | None = None
    deadline_s = time.perf_counter() + START_TIMEOUT_S
    async with new_session(target) as session:
        while time.perf_counter() < deadline_s:
            if process.returncode is not None:
                raise PeerError(f"it ended with status {process.returncode}: {last_line(log)} (see {log})")
            outcome = await complete(session, target, FIRST_REQUEST)
            if outcome.is_good:
                return
            problem = outcome.error or outcome.wrong_length
            await asyncio.sleep(POLL_S)
    raise PeerError(f"no answer within {START_TIMEOUT_S:g} s: {problem} (see {log})")


async def end(process: asyncio.subprocess.Process) -> None:
    """End a server politely, then whatever is left of its processes."""
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
    _, left = await asyncio.to_thread(psutil.wait_procs, descendants, 2.0)
    for descendant in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    await asyncio.to_thread(psutil.wait_procs, left, 5.0)


async def rest(pid: int, seconds: float) -> RestingServer:
    """Watch a server while nothing is asked of it."""
    async with watch_processes(pid) as usage:
        await asyncio.sleep(seconds)
    assert usage is not None
    return RestingServer(usage.peak_pss_bytes, usage.cpu_s / seconds)


class OtherWork:
    """How much of the machine went to neither the server nor us: what makes a figure doubtful."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._started_s = time.perf_counter()
        self._before_s = self._unexplained_s()

    def fraction(self) -> float:
        """Return the part of all cores' time since the start, 0 to 1."""
        elapsed_s = (time.perf_counter() - self._started_s) * (os.cpu_count() or 1)
        return max(0.0, self._unexplained_s() - self._before_s) / elapsed_s

    def _unexplained_s(self) -> float:
        machine = psutil.cpu_times()
        busy_s = machine.user + machine.nice + machine.system + machine.irq + machine.softirq + machine.steal
        return float(busy_s - cpu_seconds(self._pid) - time.process_time())
