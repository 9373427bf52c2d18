"""Watches a server from outside while it is measured: memory and CPU time of its processes, latency of /health."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MEMORY_INTERVAL_S = 0.5
HEALTH_INTERVAL_S = 0.02
PROBE = Path(__file__).with_name("health_probe.py")


@dataclass
class ProcessUsage:
    """Of a process tree. RSS counts shared memory once per process, PSS once (None: not readable here)."""

    peak_rss_bytes: int = 0
    peak_pss_bytes: int | None = 0
    cpu_s: float = 0.0


@dataclass
class HealthProbe:
    """Latencies of /health, as health_probe.py describes them."""

    latencies_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    errors: int = 0
    first_error: str | None = None


def _process_tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_seconds(pid: int) -> float:
    """Return user and system time of all living processes below and including `pid`."""
    total_s = 0.0
    for process in _process_tree(pid):
        try:
            times = process.cpu_times()
            total_s += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total_s


def _memory_bytes(pid: int) -> tuple[int, int | None]:
    """Return RSS and PSS of the tree."""
    rss_bytes, pss_bytes = 0, 0
    is_readable = True
    for process in _process_tree(pid):
        try:
            rss_bytes += process.memory_info().rss
            pss_bytes += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
        except (psutil.AccessDenied, AttributeError):
            is_readable = False
    return rss_bytes, pss_bytes if is_readable else None


async def _watch_memory(pid: int, usage: ProcessUsage) -> None:
    while True:
        try:
            rss_bytes, pss_bytes = await asyncio.to_thread(_memory_bytes, pid)
        except psutil.NoSuchProcess:
            return
        usage.peak_rss_bytes = max(usage.peak_rss_bytes, rss_bytes)
        if pss_bytes is None or usage.peak_pss_bytes is None:
            usage.peak_pss_bytes = None
        else:
            usage.peak_pss_bytes = max(usage.peak_pss_bytes, pss_bytes)
        await asyncio.sleep(MEMORY_INTERVAL_S)


@asynccontextmanager
async def watch_processes(pid: int | None) -> AsyncIterator[ProcessUsage | None]:
    """Fill what is yielded: memory while the block runs, CPU seconds at its end (None: no pid)."""
    if pid is None:
        yield None
        return
    usage = ProcessUsage()
    cpu_before_s = cpu_seconds(pid)
    watcher = asyncio.create_task(_watch_memory(pid, usage))
    try:
        yield usage
        with suppress(psutil.NoSuchProcess):  # it died meanwhile, which the requests' errors say
            usage.cpu_s = cpu_seconds(pid) - cpu_before_s
    finally:
        watcher.cancel()


@asynccontextmanager
async def probe_health(url: str | None) -> AsyncIterator[HealthProbe | None]:
    """Run health_probe.py against `url` while the block runs; fill what is yielded at its end (None: no url)."""
    if url is None:
        yield None
        return
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROBE), url, str(HEALTH_INTERVAL_S), stdin=pipe, stdout=pipe
    )
    health = HealthProbe()
    try:
        assert process.stdout is not None
        await process.stdout.readline()  # it has begun
        yield health
    finally:
        output, _ = await process.communicate(b"")  # closes its standard input
    vars(health).update(json.loads(output))
