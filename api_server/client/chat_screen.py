"""Where a conversation is read from and shown: a terminal, or a pipe that programs write questions to.

Invariant: nothing that a server says reaches a stream but through `safe`. At a terminal thoughts are dimmed; in a pipe
standard output has the answers and nothing else, one after the other, and the rest goes to standard error.
"""

from __future__ import annotations

import contextlib
import io
import sys

from octavo.api_server.client.terminal_text import safe

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
FENCE = '"""'
PROMPT, PROMPT_INSIDE = "> ", "... "


class Screen:
    """Standard input, output and error, as what they are."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._is_thinking = False
        self._at_line_start = True
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - gives `input` its editing and its history

    def read_question(self) -> str | None:
        """Return the next line, or all lines between two fences; None at the end of the input."""
        line = self._read_line(PROMPT)
        if line is None or not line.strip().startswith(FENCE):
            return line
        lines = [line.strip().removeprefix(FENCE)]
        while not lines[-1].rstrip().endswith(FENCE):
            if (line := self._read_line(PROMPT_INSIDE)) is None:
                return "\n".join(lines)
            lines.append(line)
        return "\n".join(lines).rstrip().removesuffix(FENCE).strip("\n")

    def show_thought(self, text: str) -> None:
        self._is_thinking = True
        if self.is_terminal:
            self._write(f"{DIM}{safe(text)}{NORMAL}", text)
        else:
            print(safe(text), end="", file=sys.stderr, flush=True)  # noqa: T201

    def show_answer(self, text: str) -> None:
        if self._is_thinking:
            self._end_thought()
        self._write(safe(text), text)

    def end_answer(self) -> None:
        """End the line of an answer, whether or not there was any."""
        if self._is_thinking:
            self._end_thought()
        if not self._at_line_start:
            self._write("\n", "\n")

    def note(self, text: str) -> None:
        """Say something that is not the model's."""
        print(f"octavo: {safe(text)}", file=sys.stderr, flush=True)  # noqa: T201

    def _end_thought(self) -> None:
        self._is_thinking = False
        if not self.is_terminal:
            print(file=sys.stderr, flush=True)  # noqa: T201
        elif not self._at_line_start:
            self._write("\n\n", "\n")

    def _write(self, shown: str, text: str) -> None:
        self._at_line_start = text.endswith("\n")
        print(shown, end="", flush=True)  # noqa: T201

    def _read_line(self, prompt: str) -> str | None:
        if self.is_terminal:
            try:
                return input(prompt)
            except EOFError:
                return None
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
