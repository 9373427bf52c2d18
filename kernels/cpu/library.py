"""The compiled library of CPU kernels: whether it is there, its instruction sets, and kernels by name.

It is a plain shared library with a C interface, loaded with ctypes and given addresses of tensors. It is missing where
the package was installed without a C++ compiler. Rejected: torch's extension mechanism, which needs torch's headers,
minutes of compilation, and a new build for each version of torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

INSTRUCTION_SETS = ("amx", "avx512_bf16", "avx512", "avx2", "portable")
"""Best first."""

_FAILURES = {1: IndexError("a token id or a slot is outside its table"), 2: MemoryError("no memory for a kernel")}


class Command(ctypes.Structure):
    """A kernel and the address of its arguments."""

    _fields_ = (("kernel", ctypes.c_void_p), ("args", ctypes.c_void_p))


def find_library() -> Path | None:
    """Return where the compiled library is, None when there is none."""
    spec = importlib.util.find_spec("octavo.kernels.cpu._native")
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


class Library:
    """The library with one instruction set chosen."""

    def __init__(self, path: Path, instruction_set: str | None = None) -> None:
        """`instruction_set`: None takes the best that this machine has. Raises ValueError for one that it has not."""
        self._library = ctypes.CDLL(str(path))
        self._library.octavo_kernel.restype = ctypes.c_void_p
        self._library.octavo_team_create.restype = ctypes.c_void_p
        self._library.octavo_run.argtypes = (
            ctypes.c_void_p,
            ctypes.POINTER(Command),
            ctypes.c_int64,
            ctypes.c_int64,
        )
        self._library.octavo_team_destroy.argtypes = (ctypes.c_void_p,)
        self._library.octavo_team_destroy.restype = None
        supported = [name for name in INSTRUCTION_SETS if self._library.octavo_is_supported(name.encode())]
        if instruction_set is not None and instruction_set not in supported:
            raise ValueError(f"this machine has no {instruction_set}, only {', '.join(supported)}")
        self.supported = supported
        self.instruction_set = instruction_set or supported[0]

    def kernel(self, name: str) -> tuple[int, ...]:
        """Return the addresses of a kernel and of the phases behind it; raises KeyError for an unknown name."""
        addresses = []
        while (address := self._address(f"{name}.{len(addresses) + 1}" if addresses else name)) is not None:
            addresses.append(address)
        if not addresses:
            raise KeyError(f"no kernel {name} for {self.instruction_set}")
        return tuple(addresses)

    def has_kernel(self, name: str) -> bool:
        """Return whether the instruction set has this kernel, for those that not all have."""
        return self._address(name) is not None

    def _address(self, name: str) -> int | None:
        return self._library.octavo_kernel(self.instruction_set.encode(), name.encode())

    def make_team(self, num_threads: int) -> Team:
        """Return a team of `num_threads`, the calling thread among them; raises OSError when they cannot be had."""
        handle = self._library.octavo_team_create(num_threads)
        if not handle:
            raise OSError(f"cannot start {num_threads} threads")
        return Team(self._library, handle)


class Team:
    """Threads that run commands; one caller at a time."""

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._library = library
        self._handle = handle

    def run(self, commands: ctypes.Array[Command], num_commands: int, num_rows: int) -> None:
        """Run a list; raises IndexError or MemoryError when a kernel says so, after the list has come to its end."""
        _check(self._library.octavo_run(self._handle, commands, num_commands, num_rows))

    def close(self) -> None:
        """End the threads."""
        self._library.octavo_team_destroy(self._handle)


def _check(failure: int) -> None:
    if failure:
        raise _FAILURES[failure]
