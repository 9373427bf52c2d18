"""How a process of the tree starts, reports, is told to stop, and ends.

The supervisor starts `python -m octavo.<package>` with two pipes. Standard input carries the Launch, then one-byte
commands, and stays open for the life of the supervisor: its end means that the supervisor is gone, and the process
leaves at once. The status pipe carries Progress, Ready and Failed the other way. Invariant: no process outlives its
supervisor, whatever ended it. SIGINT and SIGTERM are ignored below the supervisor, because terminals and service
managers send them to the whole group, and only the supervisor knows the order of a drain. Rejected: fork and
multiprocessing (pickle, inherited locks), and config in arguments (visible to every user).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum

import msgspec
import setproctitle

from octavo.protocol.config import EngineConfig

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LENGTH_BYTES = 4
PORT_PHASE = "port"


class ExitCode(IntEnum):
    """Exit status of `octavo serve`, one per class of problem; documented in the README."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    OUT_OF_MEMORY = 3
    PORT_TAKEN = 4
    UNSUPPORTED_MODEL = 5
    BAD_WEIGHTS = 6
    MODEL_NOT_FOUND = 7
    PROCESS_DIED = 8
    NODE_LOST = 9


class StartupError(Exception):
    """A problem that keeps the server from starting: one line that says what is wrong and what to change."""

    def __init__(self, exit_code: ExitCode, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.message = message


class Launch(msgspec.Struct, frozen=True):
    """What the supervisor hands to a new process.

    Attributes:
        parent_pid: the supervisor's.
        status_fd: the process's end of the status pipe.
        index: rank of a worker over all nodes, number of an API server.
        num_alike: how many processes of its kind there are over all nodes; with several, titles carry the index.
    """

    config: EngineConfig
    parent_pid: int
    status_fd: int
    index: int = 0
    num_alike: int = 1


def process_name(title: str, index: int, num_alike: int) -> str:
    """What `ps` and messages call a process: the number only where there are several of its kind."""
    return f"{title} {index}" if num_alike > 1 else title


class Status(msgspec.Struct, frozen=True, tag=True):
    """Base of what a process reports to the supervisor."""


class Progress(Status, frozen=True):
    """A phase of the start is over: its name, its seconds, and what there is to say about it.

    The phase PORT_PHASE of an API server says that its port is bound; `detail` is then the URL. Until it comes, workers
    wait for their Launch, so that a taken port costs no loading of weights.
    """

    phase: str
    duration_s: float
    detail: str = ""


class Ready(Status, frozen=True):
    """The process does its work from now on."""

    detail: str = ""


class Failed(Status, frozen=True):
    """The process ends because of this."""

    exit_code: ExitCode
    message: str


AnyStatus = Progress | Ready | Failed
encode_status = msgspec.json.Encoder().encode
decode_status = msgspec.json.Decoder(AnyStatus).decode


class Command(IntEnum):
    """One byte on the control pipe.

    DRAIN goes to API servers only: take no more work after the grace, finish what runs, end. Each further DRAIN while
    one is under way says that the time for it is over. STOP: end at once.
    """

    DRAIN = ord("D")
    STOP = ord("S")


class Reporter:
    """The child's end of the status pipe: one JSON line per status."""

    def __init__(self, status_fd: int) -> None:
        self.status_fd = status_fd
        self.phase_started_s = time.monotonic()

    def send(self, status: AnyStatus) -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone; the control pipe's end is next
            os.write(self.status_fd, encode_status(status) + b"\n")

    def progress(self, phase: str, detail: str = "") -> None:
        """Report that `phase`, which began at the previous report or at the start, is over."""
        now_s = time.monotonic()
        self.send(Progress(phase, now_s - self.phase_started_s, detail))
        self.phase_started_s = now_s

    def ready(self, detail: str = "") -> None:
        self.send(Ready(detail))


def write_launch(pipe_fd: int, launch: Launch) -> None:
    """Supervisor's side: send the Launch down the control pipe; waits for the reader when the pipe is full.

    Raises BrokenPipeError when the process is gone.
    """
    frame = msgspec.msgpack.encode(launch)
    rest = memoryview(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)
    while rest:
        rest = rest[os.write(pipe_fd, rest) :]


def _read_exactly(num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = os.read(sys.stdin.fileno(), num_bytes - len(data))
        if not part:
            os._exit(ExitCode.FAILURE)
        data += part
    return data


def read_launch() -> Launch:
    """Child's side: read the Launch from standard input."""
    num_bytes = int.from_bytes(_read_exactly(LENGTH_BYTES), "little")
    return msgspec.msgpack.decode(_read_exactly(num_bytes), type=Launch)


def _watch_control_pipe(ipc_directory: str, on_command: Callable[[Command], None]) -> None:
    try:
        while byte := os.read(sys.stdin.fileno(), 1):
            command = Command(byte[0])
            if command is Command.STOP:
                os._exit(ExitCode.OK)
            on_command(command)
        # The supervisor died without a word, so nobody else removes the sockets.
        shutil.rmtree(ipc_directory, ignore_errors=True)
    except Exception:
        logging.exception("the control pipe failed")
    finally:  # a process that nobody can stop must not live
        os._exit(ExitCode.FAILURE)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, even while it is stuck inside a kernel or the GIL.

    The supervisor calls it in a new worker between fork and exec, so that it also covers the imports. The setting
    survives exec. The other processes have only the pipe: they shall live long enough to remove the sockets.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the call
        os._exit(ExitCode.FAILURE)


def run_child(
    title: str,
    main: Callable[[Launch, Reporter], None],
    on_command: Callable[[Command], None] = lambda command: None,
) -> None:
    """Run `main` as a process of the tree and end the process with its exit code; never returns.

    `on_command` is called in the watching thread for every command but STOP, which ends the process at once.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    launch = read_launch()
    name = process_name(title, launch.index, launch.num_alike)
    setproctitle.setproctitle(f"octavo: {name}")
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s {name}: %(message)s", stream=sys.stderr)
    reporter = Reporter(launch.status_fd)
    watcher = threading.Thread(
        target=_watch_control_pipe, args=(launch.config.ipc_directory, on_command), daemon=True, name="control"
    )
    watcher.start()
    exit_code = ExitCode.OK
    try:
        main(launch, reporter)
    except StartupError as problem:
        exit_code = problem.exit_code
        reporter.send(Failed(problem.exit_code, problem.message))
    except Exception as problem:
        logging.exception("%s failed", name)
        exit_code = ExitCode.FAILURE
        reporter.send(Failed(exit_code, f"{name}: {type(problem).__name__}: {problem}"))
    with contextlib.suppress(OSError):  # nobody reads the log any more
        sys.stderr.flush()
    os._exit(exit_code)
