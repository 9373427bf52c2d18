"""What this machine can do at best with some threads: bytes read per second, and operations per second of each type.

Measured by loops of C++ (machine_peaks.cpp) in the same team of threads that runs the kernels, because data sheets know
neither the clock under vector load nor what a virtual machine gets of the memory.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octavo.kernels.cpu.library import Command, Library, Team

sys.path.insert(0, str(Path(__file__).parents[1]))
from native_build import SOURCES, build_library

PART_BYTES = 2**18
NUM_RUNS = 7
RUN_S = 0.02


class _PeakArgs(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("num_rounds", ctypes.c_int64),
        ("operations", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
    )


class Peaks(NamedTuple):
    """Of all threads together; a type without an instruction of its own counts as fp32."""

    bytes_per_s: float
    fp32_per_s: float
    bf16_per_s: float
    int8_per_s: float

    def describe(self) -> str:
        types = ("fp32", self.fp32_per_s), ("bf16", self.bf16_per_s), ("int8", self.int8_per_s)
        speeds = ", ".join(f"{name} {speed / 1e9:,.0f} GOP/s" for name, speed in types)
        return f"memory {self.bytes_per_s / 1e9:.1f} GB/s, {speeds}"


class _Loops:
    """The loops, with memory to read."""

    def __init__(self, library: Library, num_threads: int, num_bytes: int) -> None:
        self._library = library
        self._team: Team = library.make_team(num_threads)
        self._memory = np.ones(num_bytes // 4, np.float32)
        self._operations = np.zeros(num_threads, np.float64)
        self._sink = np.zeros(16 * num_threads, np.float32)

    def run_s(self, name: str, num_rounds: int = 0) -> float:
        addresses = [each.ctypes.data for each in (self._memory, self._operations, self._sink)]
        args = _PeakArgs(addresses[0], self._memory.nbytes, num_rounds, *addresses[1:])
        self._operations[:] = 0
        commands = (Command * 1)(Command(self._library.kernel(name)[0], ctypes.addressof(args)))
        started_s = time.perf_counter()
        self._team.run(commands, 1, 1)
        return time.perf_counter() - started_s

    def bytes_per_s(self) -> float:
        return self._memory.nbytes / statistics.median(self.run_s("read_memory") for _ in range(NUM_RUNS))

    def operations_per_s(self, name: str) -> float | None:
        try:
            num_rounds = int(1000 * RUN_S / self.run_s(name, 1000)) + 1000
        except KeyError:
            return None
        time_s = statistics.median(self.run_s(name, num_rounds) for _ in range(NUM_RUNS))
        return float(self._operations.sum()) / time_s

    def close(self) -> None:
        self._team.close()


def measure_peaks(instruction_set: str, num_threads: int, num_bytes: int) -> Peaks:
    """Measure, reading `num_bytes` of memory again and again: what is smaller than the caches is read from those."""
    sources = [Path(__file__).with_name("machine_peaks.cpp"), SOURCES / "team.cpp", SOURCES / "library.cpp"]
    with tempfile.TemporaryDirectory() as directory:
        library = Library(build_library(sources, instruction_set, Path(directory) / "peaks.so"), instruction_set)
        loops = _Loops(library, num_threads, -(-num_bytes // PART_BYTES) * PART_BYTES)
        fp32 = loops.operations_per_s("multiply_fp32") or 0.0
        bf16, int8 = (loops.operations_per_s(f"multiply_{name}") or fp32 for name in ("bf16", "int8"))
        peaks = Peaks(loops.bytes_per_s(), fp32, bf16, int8)
        loops.close()
    return peaks
