"""Runs `octavo serve` as users do, in a session of its own, so that a test can see whatever it leaves behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

OCTAVO = str(Path(sys.executable).with_name("octavo"))
TESTS = str(Path(__file__).parent)
PATIENCE_S = 120.0
ORACLE_ARGUMENTS = ("--worker-module", "oracle_worker")  # with TESTS on the import path, as here


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for `condition`; fail with `what` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s} s for: {what}")
        time.sleep(0.01)


class ProcessTree:
    """A command, all that it starts, and the files that it leaves for sockets."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.runtime_directory = Path(tempfile.mkdtemp(prefix="octavo-test-"))
        self.stderr_path = self.runtime_directory.with_suffix(".log")
        inherited = {**os.environ, "PYTHONPATH": TESTS, "XDG_RUNTIME_DIR": str(self.runtime_directory)}
        with self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                command,
                env={**inherited, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def stderr(self) -> str:
        """All that the processes printed so far."""
        return self.stderr_path.read_text(errors="replace")

    def living(self) -> list[psutil.Process]:
        """Return the processes that are alive, the supervisor first."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return sorted(found, key=lambda process: process.pid != self.process.pid)

    def process_called(self, title: str) -> psutil.Process:
        """Return the process whose title is `octavo: <title>`."""
        for process in self.living():
            if " ".join(process.cmdline()).strip() == f"octavo: {title}":
                return process
        raise AssertionError(f"no process is called {title}; {self.stderr}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor alone."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the supervisor's end; return its exit status."""
        return self.process.wait(timeout_s)

    def wait_until_all_have_ended(self) -> None:
        """Wait until no process is alive."""
        wait_until(lambda: not self.living(), f"the end of {self.living()}", 10.0)

    def assert_nothing_is_left(self) -> None:
        """Wait until no process is alive, and check that no socket directory remains."""
        self.wait_until_all_have_ended()
        left = list(self.runtime_directory.iterdir())
        assert not left, f"left behind: {left}"

    def destroy(self) -> None:
        """Kill what still lives, after a failed test too, and remove the files of the test."""
        for process in self.living():
            process.kill()
        self.process.wait()
        shutil.rmtree(self.runtime_directory, ignore_errors=True)
        self.stderr_path.unlink(missing_ok=True)


class ServerProcess(ProcessTree):
    """`octavo serve MODEL` on a free port. As a context manager: ready inside, stopped cleanly and gone after it.

    `prefix` is a command that runs it somewhere else, such as in a network namespace.
    """

    def __init__(
        self,
        model: str | Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.prefix = prefix
        port = () if "--port" in arguments else ("--port", "0")
        super().__init__([*prefix, OCTAVO, "serve", str(model), *port, *arguments], environment)

    @property
    def url(self) -> str:
        """Where it listens, such as http://127.0.0.1:41234; waits until the port is bound."""
        wait_until(lambda: bool(self._announced_url()) or self.process.poll() is not None, "the port")
        url = self._announced_url()
        assert url, f"the server ended with {self.process.poll()}: {self.stderr}"
        return url

    def _announced_url(self) -> str:
        found = re.search(r"^  port .*?(http://[^\s/]+)", self.stderr, re.MULTILINE)
        return found[1] if found else ""

    def is_ready(self) -> bool:
        """Return whether /ready says 200; fail when the server has ended."""
        assert self.process.poll() is None, f"the server ended with {self.process.poll()}: {self.stderr}"
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=10) as answer:  # noqa: S310 - our own URL
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def wait_ready(self) -> None:
        wait_until(self.is_ready, "readiness")
        wait_until(lambda: "  ready " in self.stderr, "the line that says so")

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Stop it by a signal; return the exit status after checking that nothing is left."""
        self.send(number)
        status = self.wait()
        self.assert_nothing_is_left()
        return status

    def __enter__(self) -> ServerProcess:
        try:
            self.wait_ready()
        except BaseException:
            self.destroy()
            raise
        return self

    def __exit__(self, problem: type[BaseException] | None, *rest: object) -> None:
        try:
            if problem is None:
                status = self.stop()
                assert status == 0, f"exit status {status}: {self.stderr}"
        finally:
            self.destroy()
