"""A process of the tree that does what its argument says, for tests of the supervisor.

The argument is a list of words: each is one act, in order, before the process waits for its end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from octavo.protocol.lifecycle import (
    PORT_PHASE,
    Command,
    ExitCode,
    Launch,
    Progress,
    Reporter,
    StartupError,
    run_child,
)

acts = sys.argv[1].split()
drains = threading.Semaphore(0)


def on_command(command: Command) -> None:
    print(f"{command.name} to {acts[0]}", file=sys.stderr, flush=True)
    drains.release()


def fail(code: str) -> None:
    raise StartupError(ExitCode[code], f"told to fail with {code}")


def crash() -> None:
    raise RuntimeError("told to crash")


def wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.005)


def act(word: str, launch: Launch, reporter: Reporter) -> None:
    name, _, argument = word.partition(":")
    known: dict[str, Callable[[], object]] = {
        "port": lambda: reporter.progress(PORT_PHASE, "http://127.0.0.1:1"),
        "garbage": lambda: os.write(launch.status_fd, b"not a status\n\xff\n"),
        "lines": lambda: [reporter.send(Progress("phase", 0.0, "x" * 100)) for _ in range(int(argument))],
        "ready": reporter.ready,
        "fail": lambda: fail(argument),
        "crash": crash,
        "exit": lambda: os._exit(int(argument)),
        "suicide": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "hush": lambda: os.close(launch.status_fd),
        "sleep": lambda: time.sleep(float(argument)),
        "until": lambda: wait_for(argument),
    }
    if name in known:
        known[name]()


def main(launch: Launch, reporter: Reporter) -> None:
    for word in acts:
        if word.startswith("drains"):
            for _ in range(int(word.partition(":")[2])):
                drains.acquire()
            return
        act(word, launch, reporter)
    time.sleep(1000)


if acts[0] == "import":
    time.sleep(1000)
run_child(acts[0], main, on_command)
