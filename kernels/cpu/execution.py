"""How ops reach the CPU kernels: at once, or recorded into a list that is replayed without Python.

An op makes its result with `empty` and hands its kernel to `run`. While a list is recorded, `run` notes the kernel and
its arguments instead of computing, and `empty` takes memory from buffers that stay where they are; a buffer whose
tensors are all gone serves the next one. A recorded list computes any number of rows up to the one it was recorded
with: rows of a tensor lie one behind the other, so the first few are at the same place whatever their number, and each
kernel is told at the replay how many there are. Invariant: while a list is recorded nothing else computes, which
`forbid_torch` sees to, because that would be missing from the replay.

There is one executor per process, as there is one device: ops are functions, and have no other way to it. Threads that
share a process take turns, kernel by kernel or list by list, because a team serves one caller at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels.cpu.library import Command, Library, Team, find_library

ALIGNMENT_BYTES = 64


class CannotRecordError(RuntimeError):
    """What is being recorded computes something that is no kernel of ours, or other rows than those of the step."""


class _Buffers:
    """Memory of one recorded list."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self.num_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = max(1, math.prod(shape)) * dtype.itemsize
        free = self._free.setdefault(num_bytes, [])
        if not free:
            raw = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT_BYTES
            self.num_bytes += len(raw)
            free.append(raw[start : start + num_bytes])
        buffer = free.pop()
        lent = buffer[:]  # dies with the last tensor that shares its memory
        weakref.finalize(lent, free.append, buffer)
        return torch.from_numpy(lent)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class CommandList:
    """Recorded kernels, to be replayed on any number of rows up to `max_num_rows`."""

    def __init__(self, team: Team, turn: threading.Lock, max_num_rows: int) -> None:
        self.max_num_rows = max_num_rows
        self._team = team
        self._turn = turn
        self._buffers = _Buffers()
        self._recorded: list[tuple[int, ctypes.Structure]] = []
        self._commands: ctypes.Array[Command] = (Command * 0)()

    def __len__(self) -> int:
        return len(self._recorded)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the results on the way."""
        return self._buffers.num_bytes

    def append(self, kernel: tuple[int, ...], args: ctypes.Structure, num_rows: int) -> None:
        """Note a kernel; its arguments are kept, the tensors that they point to are not."""
        if num_rows != self.max_num_rows:
            raise CannotRecordError(f"a kernel of {num_rows} rows in a list of {self.max_num_rows}")
        self._recorded += [(phase, args) for phase in kernel]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._buffers.empty(shape, dtype)

    def close(self) -> None:
        """Make the list ready to be replayed."""
        commands = [Command(kernel, ctypes.addressof(args)) for kernel, args in self._recorded]
        self._commands = (Command * len(commands))(*commands)

    def replay(self, num_rows: int) -> None:
        """Compute the first `num_rows` rows; raises as `Team.run` does."""
        with self._turn:
            self._team.run(self._commands, len(self._recorded), num_rows)


class _ForbidTorch(TorchDispatchMode):
    """Lets views pass and nothing that computes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap the method below in what imports its compiler: seconds of the start, and 140 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns):
            raise CannotRecordError(f"{func} is no kernel of ours")
        return func(*args, **(kwargs or {}))


class Executor:
    """Runs kernels, or records them."""

    def __init__(self) -> None:
        self._library: Library | None = None
        self._team: Team | None = None
        self._list: CommandList | None = None
        self._kernels: dict[str, ctypes.Array[Command]] = {}
        self._turn = threading.Lock()
        self._started: tuple[int, str | None] | None = None

    @property
    def library(self) -> Library:
        """Raises RuntimeError when there is no compiled library."""
        if self._library is None:
            raise RuntimeError("the CPU kernels are not started")
        return self._library

    @property
    def num_threads(self) -> int:
        """Return how many threads share a kernel."""
        return 1 if self._started is None else self._started[0]

    def start(self, num_threads: int, instruction_set: str | None = None) -> str:
        """Load the library and start the threads, anew when called for others; return the instruction set.

        Raises FileNotFoundError when the package was installed without the library, ValueError when this machine does
        not have the instruction set.
        """
        path = find_library()
        if path is None:
            raise FileNotFoundError("octavo was installed without its CPU kernels")
        with self._turn:
            if self._started != (num_threads, instruction_set):
                library = Library(path, instruction_set)
                team = library.make_team(num_threads)
                if self._team is not None:
                    self._team.close()
                self._library, self._team, self._kernels = library, team, {}
                self._started = (num_threads, instruction_set)
        return self.library.instruction_set

    def run(self, name: str, args: ctypes.Structure, num_rows: int) -> None:
        """Run kernel `name`, or record it; raises as `Team.run` does.

        What `args` points to must live until the call returns.
        """
        if self._list is not None:
            self._list.append(self.library.kernel(name), args, num_rows)
        elif num_rows:
            with self._turn:
                commands = self._kernels.get(name) or self._kernels.setdefault(name, self._commands(name))
                for command in commands:
                    command.args = ctypes.addressof(args)
                self._team.run(commands, len(commands), num_rows)

    def _commands(self, name: str) -> ctypes.Array[Command]:
        commands = [Command(phase) for phase in self.library.kernel(name)]
        return (Command * len(commands))(*commands)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor for a result."""
        return torch.empty(shape, dtype=dtype) if self._list is None else self._list.empty(shape, dtype)

    @contextlib.contextmanager
    def record(self, max_num_rows: int) -> Iterator[CommandList]:
        """Record what the block gives to `run` instead of computing it; raises CannotRecordError."""
        if self._team is None:
            raise RuntimeError("the CPU kernels are not started")
        self._list = recorded = CommandList(self._team, self._turn, max_num_rows)
        try:
            with _ForbidTorch():
                yield recorded
        finally:
            self._list = None
        recorded.close()


EXECUTOR = Executor()
