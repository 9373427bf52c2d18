"""How many tokens per second one API server process can stream: fake engine at full speed, no model.

    python tests/bench/http_stream.py --streams 64 --tokens 2000

The API server runs as its own process; engine and clients share this one, so on two cores the number is the API
server's. `events/token` near 1 says that each token went out as an event of its own; less says that tokens were merged
because the engine was faster than the server. `cpu` is the server's processor time per token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_engine import FakeEngine, Script
from http_rig import MODEL, make_config

from octavo.api_server.child_process import ChildProcess, ProcessSpec, module_command, stop_all
from octavo.protocol.lifecycle import Progress, Ready

WORD = [40, 71, 68, 220, 79, 81, 82, 83]


def wait_until_ready(child: ChildProcess) -> int:
    """Return the port."""
    port = 0
    while True:
        for status in child.read_statuses():
            if isinstance(status, Progress) and status.phase == "port":
                port = int(status.detail.rpartition(":")[2])
            if isinstance(status, Ready):
                return port
        if child.has_ended():
            raise SystemExit(child.how_it_ended())
        time.sleep(0.01)


async def stream(port: int, path: str, num_tokens: int) -> int:
    """Read one stream to its end; return the number of events."""
    subject = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
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


async def measure(port: int, pid: int, arguments: argparse.Namespace, path: str) -> str:
    process = psutil.Process(pid)
    before, started_s = process.cpu_times(), time.monotonic()
    events = await asyncio.gather(*(stream(port, path, arguments.tokens) for _ in range(arguments.streams)))
    wall_s = time.monotonic() - started_s
    after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    num_tokens = arguments.tokens * arguments.streams
    return (
        f"{path:22} {num_tokens / wall_s:9,.0f} tokens/s  {sum(events) / num_tokens:5.2f} events/token  "
        f"{sum(events) / wall_s:8,.0f} events/s  cpu {1e6 * cpu_s / num_tokens:5.1f} us/token "
        f"{1e6 * cpu_s / sum(events):5.1f} us/event  busy {100 * cpu_s / wall_s:3.0f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000, help="per stream")
    parser.add_argument("--step-ms", type=float, nargs="*", default=[0.0, 2.0, 4.0], help="paces of the engine")
    arguments = parser.parse_args()
    script = Script(WORD * (arguments.tokens // len(WORD) + 1))
    for step_ms in arguments.step_ms:
        with tempfile.TemporaryDirectory() as directory:
            config = make_config(Path(directory), max_model_len=1_000_000)
            with FakeEngine(config.engine_address, lambda _: script, step_s=step_ms / 1000):
                child = ChildProcess(ProcessSpec("api server", module_command("octavo.api_server")))
                child.launch(config)
                try:
                    port = wait_until_ready(child)
                    for path in ("/v1/completions", "/v1/chat/completions"):
                        print(f"step {step_ms:4.1f} ms", asyncio.run(measure(port, child.pid, arguments, path)))
                finally:
                    stop_all([child], 1.0)


if __name__ == "__main__":
    main()
