"""What a file format offers the weight loader: tensors with their shapes known and their data not yet read."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from octavo.protocol.lifecycle import ExitCode, StartupError


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        name: its Hugging Face name.
        shape, dtype: what `read` will return.
        origin: file and name in it, for messages.
        read: returns the data; it may share memory with the file and must not be changed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: str
    read: Callable[[], torch.Tensor]


def bad_weights(message: str) -> StartupError:
    return StartupError(ExitCode.BAD_WEIGHTS, message)


def map_file(path: Path) -> torch.Tensor:
    """Return the bytes of a file as uint8 [num_bytes]; what is not looked at is not read.

    Raises StartupError(BAD_WEIGHTS) when it is missing, empty or unreadable.
    """
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch refuses read-only buffers
    except OSError as problem:
        raise bad_weights(f"{path}: {problem.strerror}") from problem
    except ValueError as problem:
        raise bad_weights(f"{path}: the file is empty") from problem
    return torch.frombuffer(mapping, dtype=torch.uint8)
