"""A process of the tree that does what its argument says, for tests of the supervisor.

The argument is a list of words: each is one act, in order, before the process waits for its end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

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


def act(word: str, launch: Launch, reporter: Reporter) -> None:
    name, _, argument = word.partition(":")
    match name:
        case "port":
            reporter.progress(PORT_PHASE, "http://127.0.0.1:1")
        case "garbage":
            os.write(launch.status_fd, b"not a status\n\xff\n")
        case "lines":
            for _ in range(int(argument)):
                reporter.send(Progress("phase", 0.0, "x" * 100))
        case "ready":
            reporter.ready()
        case "fail":
            raise StartupError(ExitCode[argument], f"told to fail with {argument}")
        case "crash":
            raise RuntimeError("told to crash")
        case "exit":
            os._exit(int(argument))
        case "suicide" | "stop":
            os.kill(os.getpid(), signal.SIGKILL if name == "suicide" else signal.SIGSTOP)
        case "hush":
            os.close(launch.status_fd)
        case "sleep":
            time.sleep(float(argument))


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
