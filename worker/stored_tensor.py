"""What a file format offers the weight loader: tensors with their shapes known and their data not yet read."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from octavo.kernels.ops.packed_linear import WeightFormat
from octavo.protocol.lifecycle import ExitCode, StartupError


class ReadRows(Protocol):
    """Returns the data, or some rows of the first dimension, in multiples of `StoredTensor.row_multiple`.

    The result may share memory with the file and must not be changed. Nothing is read but what belongs to the rows.
    """

    def __call__(self, rows: range | None = None) -> torch.Tensor: ...


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        name: its Hugging Face name.
        shape, dtype: what `read()` will return.
        origin: file and name in it, for messages.
        read: reads it as numbers.
        blocks: the blocks that the file holds, where kernels know them; None: anything else.
        read_blocks: reads the same rows as they are in the file, uint8 [n, bytes of a row]; None without `blocks`.
        row_multiple: rows are read in multiples of so many.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: str
    read: ReadRows
    blocks: WeightFormat | None = None
    read_blocks: ReadRows | None = None
    row_multiple: int = 1


def select_rows(data: torch.Tensor, shape: tuple[int, ...], rows: range | None) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the part of `data` that holds `rows`, and their shape.

    Args:
        data: uint8 [num_bytes], of a whole tensor whose rows take equally many bytes.
        shape: of the whole tensor.
    """
    if rows is None:
        return data, shape
    row_bytes = len(data) // shape[0]
    return data[rows.start * row_bytes : rows.stop * row_bytes], (len(rows), *shape[1:])


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
