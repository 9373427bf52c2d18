"""One process of the tree, seen from its supervisor: start it, hear it, command it, see it end.

Invariant: only this process and the child hold the two pipes between them, so the end of either is seen at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from octavo.api_server.stop_signals import prepare_new_process, signals_held
from octavo.protocol.config import EngineConfig
from octavo.protocol.lifecycle import (
    AnyStatus,
    Command,
    ExitCode,
    Failed,
    Launch,
    StartupError,
    decode_status,
    process_name,
    write_launch,
)

MAX_STATUS_BYTES = 1 << 20


class ProcessSpec(msgspec.Struct, frozen=True):
    """What to start.

    Attributes:
        title: what `ps` and messages call it.
        command: argument list; the process reads its Launch from standard input.
        index: rank of a worker over all nodes, number of an API server.
        num_alike: processes with this title over all nodes.
        dies_with_parent: the kernel kills it when the supervisor ends, whatever it is doing.
        environment: all of it; None hands down the supervisor's own.
    """

    title: str
    command: tuple[str, ...]
    index: int = 0
    num_alike: int = 1
    dies_with_parent: bool = False
    environment: dict[str, str] | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return process_name(self.title, self.index, self.num_alike)


def module_command(module: str) -> tuple[str, ...]:
    """Command line that runs `module`, without the working directory on its import path (-P).

    Otherwise a folder called `gguf` or `tokenizers` where the server is started would be imported.
    """
    return (sys.executable, "-P", "-m", module)


class ChildProcess:
    """A running process of the tree."""

    def __init__(self, spec: ProcessSpec) -> None:
        """Start the process; it waits for `launch`. Raises StartupError when the system has no room for it."""
        self.spec = spec
        self.is_ready = False
        self.has_launched = False
        self.has_hung_up = False
        self.failure: Failed | None = None
        self._unread = b""
        self.status_fd, child_status_fd = os.pipe()
        self._child_status_fd = child_status_fd  # its number is the same on both sides
        os.set_blocking(self.status_fd, False)
        try:
            self._process = self._start(child_status_fd)
        except OSError as problem:
            os.close(self.status_fd)
            raise StartupError(
                ExitCode.FAILURE,
                f"cannot start the {spec.name} process: {problem.strerror}; raise the limit on processes (ulimit -u) "
                "or free memory",
            ) from problem
        finally:
            os.close(child_status_fd)

    def _start(self, child_status_fd: int) -> subprocess.Popen[bytes]:
        with signals_held():
            return subprocess.Popen(
                self.spec.command,
                stdin=subprocess.PIPE,
                pass_fds=(child_status_fd,),
                env=self.spec.environment,
                bufsize=0,
                preexec_fn=prepare_new_process(os.getpid() if self.spec.dies_with_parent else None),
            )

    def launch(self, config: EngineConfig) -> None:
        """Send the config; a process that ended already is seen by its exit."""
        self.has_launched = True
        launch = Launch(config, os.getpid(), self._child_status_fd, self.spec.index, self.spec.num_alike)
        with contextlib.suppress(BrokenPipeError):
            write_launch(self._control_fd(), launch)

    def send(self, command: Command) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control_fd(), bytes([command]))

    def _control_fd(self) -> int:
        if self._process.stdin is None:
            raise BrokenPipeError
        return self._process.stdin.fileno()

    def read_statuses(self) -> list[AnyStatus]:
        """Return the complete statuses that came since the last call; what is no status is dropped."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.status_fd, 65536):
                self._unread = (self._unread + part)[-MAX_STATUS_BYTES:]
            self.has_hung_up = True
        *lines, self._unread = self._unread.split(b"\n")
        statuses: list[AnyStatus] = []
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):
                statuses.append(decode_status(line))
        return statuses

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ended_well(self) -> bool:
        return self._process.poll() == ExitCode.OK

    def was_killed(self) -> bool:
        return (self._process.poll() or 0) < 0

    def how_it_ended(self) -> str:
        """Say it in words: by which signal, or with which exit code."""
        status = self._process.poll()
        if status is None:
            return "is still running"
        if status >= 0:
            return f"ended with exit code {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:  # a real-time signal has no name
            name = f"signal {-status}"
        hint = "; perhaps the system ran out of memory" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the process has ended, waiting up to `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.has_ended()

    def close(self) -> None:
        """Close both pipes, once the process has ended."""
        os.close(self.status_fd)
        if self._process.stdin is not None:
            self._process.stdin.close()


def stop_all(children: Sequence[ChildProcess], patience_s: float) -> None:
    """End all of them: ask, wait up to `patience_s` in all, then kill; return when none is left."""
    for child in children:
        child.send(Command.STOP)
    ask_until_s = time.monotonic() + patience_s
    for child in children:
        child.wait(max(0.0, ask_until_s - time.monotonic()) if child.has_launched else 0.0)
    for child in children:
        child.kill()
    for child in children:
        child.wait(patience_s)
        child.close()
