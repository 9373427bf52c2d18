"""What the operator sees while the server starts and stops: short lines on standard error.

Invariant: a broken or closed standard error never stops the server.
"""

from __future__ import annotations

import contextlib
import os
import time

STDERR_FD = 2


class StartupLog:
    """Writes the phases of the start with their seconds."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()

    def line(self, text: str) -> None:
        """Write one line; control characters in names and paths cannot forge another."""
        printable = "".join(char if char.isprintable() else "?" for char in text)
        # Straight to the descriptor: a buffered stream would fail once more when the interpreter ends.
        with contextlib.suppress(OSError):
            os.write(STDERR_FD, f"{printable}\n".encode(errors="backslashreplace"))

    def header(self, version: str, model_name: str) -> None:
        self.line(f"octavo {version} · {model_name}")

    def phase(self, name: str, duration_s: float, detail: str = "") -> None:
        self.line(f"  {name.replace('_', ' '):<12} {duration_s:6.1f} s  {detail}".rstrip())

    def ready(self, url: str) -> None:
        """Say that requests are answered from now on, and how long that took since the command began."""
        self.phase("ready", time.monotonic() - self.started_s, url)

    def note(self, text: str) -> None:
        self.line(f"octavo: {text}")

    def error(self, message: str) -> None:
        """Write the one line that says what went wrong and what to change."""
        self.line(f"octavo: error: {' '.join(message.split())}")


def open_missing_standard_streams() -> None:
    """Point standard streams that were closed before the start at /dev/null.

    Otherwise the next socket or pipe gets their number, and what is printed goes into it.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
