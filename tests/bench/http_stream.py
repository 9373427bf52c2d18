"""How many tokens per second the server streams when the model costs nothing, and which process they cost how much.

    python tests/bench/http_stream.py --streams 64 --tokens 2000

All processes are the real ones, but the worker plays a script (`octavo serve --engine replay`). `events/token` near 1
says that each token went out as an event of its own; less says that the engine was faster than the API server, which
then merged tokens. The client here only counts events, so what it costs is what any client costs at least. Where all
share the cores, tokens per second are those of all together; the processor time per token is each one's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_process import ServerProcess

MODEL = "smollm2-135m"
TEXT = " The quick brown fox jumps over the lazy dog."
PROCESSES = ("api_server", "engine_core", "worker")
COLUMNS = (
    "route",
    "step ms",
    "tokens/s",
    "events/token",
    *(f"{name} µs/token" for name in PROCESSES),
    "client µs/token",
)


def write_script(directory: Path, paces_ms: Sequence[float]) -> str:
    """Write a script that plays at each of the paces, by what the prompt says."""
    lines = [
        {"prompt_contains": prompt_of(pace), "text": TEXT, "ends": False, "interval_ms": pace} for pace in paces_ms
    ]
    path = directory / "stream.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def prompt_of(pace_ms: float) -> str:
    return f"step {pace_ms} ms"


async def stream(port: int, path: str, prompt: str, num_tokens: int) -> int:
    """Read one stream to its end; return the number of events."""
    subject = {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    body = json.dumps({"model": MODEL, "stream": True, "max_tokens": num_tokens, **subject}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(head.encode() + b"\r\n" + body)
    num_events, tail = 0, b""
    while not tail.endswith(b"0\r\n\r\n"):
        part = await reader.read(1 << 18)
        if not part:
            raise SystemExit("a stream was cut")
        num_events += (tail[-5:] + part).count(b"data: ") - tail[-5:].count(b"data: ")
        tail = (tail + part)[-64:]
    writer.close()
    return num_events


def cpu_seconds(processes: Sequence[psutil.Process]) -> list[float]:
    times = [process.cpu_times() for process in processes]
    return [each.user + each.system for each in times]


async def measure(server: ServerProcess, path: str, pace_ms: float, num_streams: int, num_tokens: int) -> list[str]:
    """Return the cells of one line."""
    processes = [*map(server.process_called, PROCESSES), psutil.Process()]
    port, prompt = int(server.url.rpartition(":")[2]), prompt_of(pace_ms)
    before, started_s = cpu_seconds(processes), time.monotonic()
    events = await asyncio.gather(*(stream(port, path, prompt, num_tokens) for _ in range(num_streams)))
    wall_s = time.monotonic() - started_s
    total = num_tokens * num_streams
    costs = [1e6 * (end - start) / total for start, end in zip(before, cpu_seconds(processes), strict=True)]
    return [
        path,
        f"{pace_ms:g}",
        f"{total / wall_s:,.0f}",
        f"{sum(events) / total:.2f}",
        *(f"{cost:.1f}" for cost in costs),
    ]


def print_line(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000, help="per stream")
    parser.add_argument("--step-ms", type=float, nargs="*", default=[0.0, 2.0, 4.0], help="least time of a step")
    arguments = parser.parse_args()
    print_line(COLUMNS)
    print_line(["---"] * len(COLUMNS))
    with tempfile.TemporaryDirectory() as directory:
        script = write_script(Path(directory), arguments.step_ms)
        with ServerProcess(script, "--engine", "replay", "--max-num-seqs", str(max(1, arguments.streams))) as server:
            for pace_ms in arguments.step_ms:
                for path in ("/v1/completions", "/v1/chat/completions"):
                    print_line(asyncio.run(measure(server, path, pace_ms, arguments.streams, arguments.tokens)))


if __name__ == "__main__":
    main()
