"""Compiles C++ of the tests as the library of kernels is compiled."""

from __future__ import annotations

import functools
import runpy
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

REPOSITORY = Path(__file__).parents[1]
SOURCES = REPOSITORY / "kernels/cpu/csrc"
COMPILER = shutil.which("c++") or shutil.which("g++")


@functools.cache
def flags_by_instruction_set() -> dict[str, list[str]]:
    """The flags of each instruction set, as setup.py gives them."""
    with mock.patch("setuptools.setup"):
        build = runpy.run_path(str(REPOSITORY / "setup.py"))
    shared = [*build["FLAGS"], "-fvisibility=default", f"-I{SOURCES}"]
    return {isa: [*shared, *own, f"-DOCTAVO_ISA={isa}"] for isa, own in build["VARIANTS"].items()}


def build_library(sources: Sequence[Path], instruction_set: str, path: Path) -> Path:
    """Compile and link a shared library; raises RuntimeError without a compiler, CalledProcessError for an error."""
    if COMPILER is None:
        raise RuntimeError("there is no C++ compiler")
    flags = flags_by_instruction_set()[instruction_set]
    subprocess.run([COMPILER, "-shared", "-pthread", *flags, *map(str, sources), "-o", str(path)], check=True)
    return path
