"""What a worker needs of the device that it owns: memory, number formats, kernels, order, and graphs.

Two kinds implement it, `cpu_device` and `cuda_device`; a third one, which runs everything late and in a hostile order,
is the tests'. Work goes to the device in streams, as on GPUs: what one stream is given runs in that order, streams
among each other run as they like, and events tie them. A CPU does everything at once, so there the ties are nothing.
So one model runner serves all kinds, and what differs between them is written here and nowhere else.

Invariant: after the start nothing but `Event.synchronize` and `Device.synchronize` waits for the device. Rejected:
asking torch for the kind of a tensor's device where it matters (the branches would be all over the worker), and
separate runners for CPU and GPU (the second one could only be tested where there is a GPU).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import torch

from octavo.protocol.config import CacheConfig, Dtype
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.host import free_memory_bytes

MIB = 2**20
TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}
FAILED_ALLOCATIONS = ("can't allocate memory", "out of memory")  # torch has no type of its own for the host's


class Event(Protocol):
    """A point in a stream; the names are those of torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether the device has come there."""
        ...

    def synchronize(self) -> None:
        """Return when the device has come there."""
        ...

    def wait(self) -> None:
        """Let what the present stream gets from now on come after it; the host does not wait."""
        ...


class Graph(Protocol):
    """Recorded work: the same operations on the same memory, started as one."""

    def replay(self) -> None: ...


class Uploader(Protocol):
    """The way of a step's arrays to the device."""

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Return the arrays as tensors on the device, where they stay until the next upload; does not wait for it.

        Arrays that come first and have the same dtypes and shapes are at the same places each time.
        """
        ...


class MemoryBudget(NamedTuple):
    """What the KV cache may take of the device's memory.

    Attributes:
        num_bytes: that many; not positive when what is needed beside it does not fit.
        reserved_bytes: of that, what steps and graphs take while they run.
        free_bytes: what is free now.
        share: what `num_bytes` is a share of, in words.
        advice: which flag gives more.
    """

    num_bytes: int
    reserved_bytes: int
    free_bytes: int
    share: str
    advice: str


class Device(Protocol):
    """One device of one worker. Streams are torch's current stream unless a method says otherwise."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def uses_host_memory(self) -> bool:
        """Return whether its memory is the host's."""
        ...

    @property
    def has_graphs(self) -> bool:
        """Return whether forward passes of decode steps can be captured (`graph`)."""
        ...

    @property
    def records_steps(self) -> bool:
        """Return whether the forward pass can be recorded as a list of kernels (`recorded_steps`)."""
        ...

    @property
    def packs_weights(self) -> bool:
        """Return whether weights are held in the layout of the kernels (`kernels.ops.packed_linear`)."""
        ...

    def describe(self) -> str:
        """Return its name for the log."""
        ...

    def select_dtype(self, asked: Dtype | None, stored: Dtype | None) -> tuple[torch.dtype, str]:
        """Return the dtype to compute in, and in words why when it is not what was asked or stored."""
        ...

    def select_kernels(self, is_deterministic: bool) -> dict[str, str]:
        """Choose the implementations of all ops for this process; return them, op -> backend."""
        ...

    def free_bytes(self) -> int:
        """Return the memory that this worker can still take."""
        ...

    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        """Return by how much the memory in use rises while `run` works."""
        ...

    def kv_budget(self, cache: CacheConfig, free_bytes: int, reserved_bytes: int) -> MemoryBudget:
        """Return what the KV cache may take.

        Args:
            free_bytes: what was free before the largest step ran.
            reserved_bytes: what steps and graphs take beside the weights.
        """
        ...

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in host memory that the device can copy from and to without waiting."""
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in host memory that has the content of `tensor` when the device has come this far."""
        ...

    def make_uploader(self, num_bytes: int) -> Uploader:
        """Return the way of a step's arrays to the device, for steps of up to `num_bytes`; more is possible."""
        ...

    def record(self) -> Event:
        """Return an event at the end of what the present stream has been given."""
        ...

    def on_side_stream(self) -> AbstractContextManager[object]:
        """Give what is done inside to the side stream, which is for copies."""
        ...

    def synchronize(self) -> None:
        """Return when everything that was given to the device is done."""
        ...

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Record what `run` does instead of doing it; return it and the tensor that each replay leaves its result in.

        All graphs share one pool of memory, so a result lasts until the next replay of any of them.
        """
        ...


def out_of_memory(purpose: str, needed_bytes: int | None, advice: str, free_bytes: int | None = None) -> StartupError:
    """Return the error that says what is needed (None: not known), what is free (None: the host's), and what helps."""
    needed = "more" if needed_bytes is None else f"{needed_bytes / MIB:.1f} MiB"
    free = f"{(free_memory_bytes() if free_bytes is None else free_bytes) / MIB:.1f} MiB"
    return StartupError(
        ExitCode.OUT_OF_MEMORY, f"not enough memory for {purpose}: {needed} needed, {free} free; {advice}"
    )


def check_fits(purpose: str, needed_bytes: int, advice: str, free_bytes: int | None = None) -> None:
    """Raise StartupError(OUT_OF_MEMORY) when `needed_bytes` are more than `free_bytes` (None: what the host has)."""
    if needed_bytes > (free_memory_bytes() if free_bytes is None else free_bytes):
        raise out_of_memory(purpose, needed_bytes, advice, free_bytes)


@contextlib.contextmanager
def explain_out_of_memory(
    purpose: str, needed_bytes: int | None, advice: str, free_bytes: int | None = None
) -> Iterator[None]:
    """Turn a failed allocation inside the block (a limit that no file shows) into StartupError(OUT_OF_MEMORY)."""
    try:
        yield
    except MemoryError as problem:
        raise out_of_memory(purpose, needed_bytes, advice, free_bytes) from problem
    except RuntimeError as problem:
        if not any(words in str(problem) for words in FAILED_ALLOCATIONS):
            raise
        raise out_of_memory(purpose, needed_bytes, advice, free_bytes) from problem
