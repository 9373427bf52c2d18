"""The CPU kernels, with each instruction set that this machine has and with one thread and with two."""

from __future__ import annotations

from collections.abc import Iterator

import cpu_kernels
import pytest

from octavo.kernels.cpu.execution import EXECUTOR, Executor
from octavo.kernels.cpu.library import find_library

collect_ignore_glob = [] if find_library() else ["test_*.py"]  # installed without a compiler


@pytest.fixture(params=cpu_kernels.supported_instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> str:
    """Every test that takes this runs once for each instruction set of this machine."""
    return request.param


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def num_threads(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def executor(instruction_set: str, num_threads: int) -> Iterator[Executor]:
    """Started with each instruction set and each number of threads; ops must still be called as backends."""
    EXECUTOR.start(num_threads, instruction_set)
    yield EXECUTOR
    EXECUTOR.start(1)


@pytest.fixture
def each_isa(instruction_set: str) -> Iterator[Executor]:
    """Started with each instruction set and two threads: where the number of threads is not the question."""
    EXECUTOR.start(2, instruction_set)
    yield EXECUTOR
    EXECUTOR.start(1)
