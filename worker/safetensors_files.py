"""Weights from safetensors files, one or several shards (https://huggingface.co/docs/safetensors).

A file is an eight-byte length, a JSON header, and the data. Headers are read and checked in full before anything else
is done with a file: known dtypes, sizes that follow from the shapes, and data that the tensors cover exactly, so that a
truncated file or a changed header is found before memory is allocated, and the message can name the tensor. The header
is read here, not by the `safetensors` library, because the library's errors do not name file and tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from octavo.worker.stored_tensor import StoredTensor, bad_weights, map_file, select_rows

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

NonNegative = Annotated[int, msgspec.Meta(ge=0)]


class _TensorHeader(msgspec.Struct):
    """One entry of the header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[NonNegative, ...]
    data_offsets: tuple[NonNegative, NonNegative]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_header(path: Path, data: torch.Tensor) -> tuple[dict[str, _TensorHeader], int]:
    """Return the entries and where the data begins."""
    header_start = min(LENGTH_BYTES, len(data))
    length = int.from_bytes(data[:header_start].numpy().tobytes(), "little")
    data_start = LENGTH_BYTES + length
    if data_start > len(data):
        raise bad_weights(f"{path}: the header should end at byte {data_start}, the file has {len(data)} bytes")
    try:
        entries = msgspec.json.decode(data[header_start:data_start].numpy(), type=dict[str, msgspec.Raw])
        entries.pop(METADATA_KEY, None)
    except ValueError as problem:
        raise bad_weights(f"{path}: the header is not valid: {problem}") from problem
    return {name: _read_entry(path, name, entry) for name, entry in entries.items()}, data_start


def _read_entry(path: Path, name: str, entry: msgspec.Raw) -> _TensorHeader:
    try:
        header = msgspec.json.decode(entry, type=_TensorHeader)
    except ValueError as problem:
        raise bad_weights(f"{path}: tensor {name}: the header is not valid: {problem}") from problem
    if header.dtype not in DTYPES:
        raise bad_weights(f"{path}: tensor {name} has dtype {header.dtype}, which is not supported")
    num_bytes = math.prod(header.shape) * DTYPES[header.dtype].itemsize
    begin, end = header.data_offsets
    if end - begin != num_bytes:
        raise bad_weights(
            f"{path}: tensor {name} of {header.dtype} {list(header.shape)} needs {num_bytes} bytes, "
            f"its offsets hold {end - begin}"
        )
    return header


def _check_coverage(path: Path, headers: dict[str, _TensorHeader], num_bytes: int) -> None:
    """Raise unless the tensors lie one behind the other and end with the file."""
    expected = 0
    for name, header in sorted(headers.items(), key=lambda item: item[1].data_offsets):
        begin, end = header.data_offsets
        if begin != expected:
            raise bad_weights(f"{path}: tensor {name} begins at byte {begin} of the data, expected {expected}")
        if end > num_bytes:
            raise bad_weights(
                f"{path}: tensor {name} ends at byte {end} of the data, the file holds {num_bytes}: it is truncated"
            )
        expected = end
    if expected != num_bytes:
        raise bad_weights(f"{path}: {num_bytes - expected} bytes behind the last tensor belong to none")


def _read(data: torch.Tensor, header: _TensorHeader, rows: range | None = None) -> torch.Tensor:
    begin, end = header.data_offsets
    part, shape = select_rows(data[begin:end], header.shape, rows)
    dtype = DTYPES[header.dtype]
    if (part.data_ptr() % dtype.itemsize) != 0:  # an unpadded header; views need aligned data
        part = part.clone()
    return part.view(dtype).view(shape)


def _open_file(path: Path) -> Iterator[StoredTensor]:
    mapped = map_file(path)
    headers, data_start = _read_header(path, mapped)
    data = mapped[data_start:]
    _check_coverage(path, headers, len(data))
    for name, header in headers.items():
        yield StoredTensor(
            name, header.shape, DTYPES[header.dtype], f"{path}: tensor {name}", partial(_read, data, header)
        )


def _indexed_files(directory: Path) -> dict[str, str]:
    """Return tensor name -> file name, from the index of a sharded checkpoint."""
    path = directory / INDEX_FILE
    try:
        weight_map = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except ValueError as problem:
        raise bad_weights(f"{path}: {problem}") from problem
    for tensor, name in weight_map.items():
        if Path(name).name != name:
            raise bad_weights(f"{path}: tensor {tensor}: {name!r} is not the name of a file beside it")
        if not (directory / name).is_file():
            raise bad_weights(f"{path}: {name} is missing, which holds tensor {tensor}")
    return weight_map


def _file_names(directory: Path) -> list[str]:
    """Without an index: the file of the usual name, else every safetensors file."""
    if (directory / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise bad_weights(f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}; other formats must be converted first")
    return names


def open_safetensors(directory: str) -> dict[str, StoredTensor]:
    """Return the tensors of the checkpoint in `directory` by name, checked as far as headers go.

    Raises StartupError(BAD_WEIGHTS) naming the file and, where there is one, the tensor.
    """
    folder = Path(directory)
    weight_map = _indexed_files(folder) if (folder / INDEX_FILE).is_file() else None
    names = _file_names(folder) if weight_map is None else sorted(set(weight_map.values()))
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        for stored in _open_file(folder / name):
            if stored.name in tensors:
                raise bad_weights(f"{stored.origin} is also in {tensors[stored.name].origin}")
            tensors[stored.name] = stored
    for tensor, name in (weight_map or {}).items():
        if tensor not in tensors:
            raise bad_weights(f"{folder / name}: tensor {tensor} is missing, {INDEX_FILE} names it")
    return tensors
