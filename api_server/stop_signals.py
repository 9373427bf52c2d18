"""Signals as data: what the operator and the kernel say, read in order from a file descriptor.

Invariant: no signal ever raises in the middle of other code, so whatever is half done can be undone. Rejected:
handlers that raise, because a second Ctrl-C then interrupts the clean-up of the first; and a signal mask with sigwait,
because children and threads inherit the mask.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO, NamedTuple

from octavo.protocol.lifecycle import die_with_parent

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WATCHED_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD)


class StopRequestedError(Exception):
    """A signal asked to stop while something was still being prepared."""


def _ignore(signal_number: int, frame: FrameType | None) -> None:
    """Do nothing: Python wakes the file descriptor only for signals with a handler."""


class SignalInbox:
    """Collects SIGINT, SIGTERM, SIGHUP and SIGCHLD for the main thread while it is entered."""

    def __enter__(self) -> SignalInbox:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._previous_handlers = {number: signal.getsignal(number) for number in WATCHED_SIGNALS}
        for number in WATCHED_SIGNALS:
            if number == signal.SIGHUP and self._previous_handlers[number] is signal.SIG_IGN:
                continue  # nohup: the server shall outlive the terminal
            signal.signal(number, _ignore)
        return self

    def __exit__(self, *problem: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Readable when a signal came: for selectors."""
        return self._reader.fileno()

    def read(self) -> list[signal.Signals]:
        """Return the signals that came since the last call, in order."""
        try:
            return [signal.Signals(byte) for byte in self._reader.recv(4096)]
        except BlockingIOError:
            return []

    def raise_if_stopped(self) -> None:
        """Raise StopRequestedError when a stop signal came since the last call."""
        if any(number in STOP_SIGNALS for number in self.read()):
            raise StopRequestedError


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold the watched signals back, so that a new process cannot answer them in its parent's name."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def prepare_new_process(parent_pid: int | None) -> Callable[[], None]:
    """Return what a new process does before exec: it leaves stop signals to its parent.

    Signals from a terminal or a service manager go to the whole group, also during the imports of a process that will
    ignore them later. With `parent_pid` the process also dies with that parent.
    """

    def prepare() -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED_SIGNALS)
        if parent_pid is not None:
            die_with_parent(parent_pid)

    return prepare


class Finished(NamedTuple):
    """How a helper process ended: its exit status (negative: a signal) and what it wrote to its output."""

    returncode: int
    output: str


class HelperRunner:
    """Runs one helper process at a time and waits for it, while the operator can still stop everything."""

    def __init__(self, signals: SignalInbox) -> None:
        self.signals = signals

    def run(self, command: list[str], stderr: int | None = None) -> Finished:
        """Run `command` to its end; `stderr` is subprocess.STDOUT to read it as well, None to leave it alone.

        Raises StopRequestedError, after the helper and all that it started are gone, when a stop signal comes.
        """
        self.signals.raise_if_stopped()
        with signals_held():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                preexec_fn=prepare_new_process(os.getpid()),
                process_group=0,  # so that what it starts can be ended with it
            )
        try:
            output = self._read_to_end(process.stdout)
            return Finished(process.wait(), output)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _read_to_end(self, stream: IO[bytes] | None) -> str:
        if stream is None:
            return ""
        data = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.signals, selectors.EVENT_READ)
            selector.register(stream, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self.signals in ready:
                    self.signals.raise_if_stopped()
                if stream in ready:
                    part = os.read(stream.fileno(), 65536)
                    if not part:
                        return data.decode(errors="replace")
                    data += part
