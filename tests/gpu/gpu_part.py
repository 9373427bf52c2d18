"""What the parts of the check of a GPU share: their options, and results that are printed as they come.

A part is a program with a `main(options, report)`. It prints one JSON line per result, at once, so that what it had
found is not lost when it fails or is stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import NamedTuple

from octavo.protocol.config import DeviceKind

RESULT = "RESULT "


class Options(NamedTuple):
    """What to check.

    Attributes:
        device: where the runner under test computes; the CPU is for trying out the check itself.
        is_tiny: small shapes and a made-up model, to the same end.
        model: GGUF file or directory of the real model; None for the embedded one.
    """

    device: DeviceKind = DeviceKind.CUDA
    is_tiny: bool = False
    model: str | None = None


class Result(NamedTuple):
    """One line of the table; `is_ok` is None for a figure that is neither right nor wrong."""

    name: str
    value: str
    is_ok: bool | None = None


class Report:
    """Prints results; `has_failed` says whether one of them is wrong."""

    def __init__(self) -> None:
        self.results: list[Result] = []

    def add(self, name: str, value: str, is_ok: bool | None = None) -> None:
        self.results.append(Result(name, value, is_ok))
        print(RESULT + json.dumps(self.results[-1]), flush=True)

    @property
    def has_failed(self) -> bool:
        return any(result.is_ok is False for result in self.results)


Main = Callable[[Options, Report], None]


def run_part(main: Main) -> None:
    """Run `main` with the options of the command line; exit status 1 when a result is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=DeviceKind, default=DeviceKind.CUDA)
    parser.add_argument("--tiny", action="store_true", help="small shapes and a made-up model")
    parser.add_argument("--model", help="GGUF file or directory (default: the embedded model)")
    arguments = parser.parse_args()
    report = Report()
    main(Options(arguments.device, arguments.tiny, arguments.model), report)
    sys.exit(1 if report.has_failed else 0)
