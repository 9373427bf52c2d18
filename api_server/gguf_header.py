"""Reads the header of a GGUF file: its metadata and where its tensors lie.

Format: the GGUF specification in the ggml repository (docs/gguf.md), versions 2 and 3, little-endian. Invariant:
nothing is read past the end of the file and no length in it is believed before it is compared with what is there, so a
broken or hostile file costs no more memory than its own size. Rejected: GGUFReader of the gguf library, because it
makes numpy objects of every token of the vocabulary, which takes seconds.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.protocol.model_files import GgufTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING_TYPE = 8
ARRAY_TYPE = 9


class GgufHeader(NamedTuple):
    """Metadata by key, and the tensors in the order of the file."""

    file_num_bytes: int
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


class GgufError(Exception):
    """What is wrong with the file, without its name."""


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of `path`; raises StartupError with BAD_WEIGHTS when the file is broken or cut off."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).read_header()
    except GgufError as problem:
        raise StartupError(ExitCode.BAD_WEIGHTS, f"{path}: {problem}; fetch the file again") from problem
    except ValueError as problem:  # an empty file cannot be mapped
        raise StartupError(ExitCode.BAD_WEIGHTS, f"{path}: the file is empty") from problem


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def read_header(self) -> GgufHeader:
        if self._take(len(MAGIC)) != MAGIC:
            raise GgufError("this is not a GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            raise GgufError(f"GGUF version {version} is not one of {', '.join(map(str, VERSIONS))}")
        num_tensors, num_entries = self._count(), self._count()
        metadata = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        raw_tensors = [self._raw_tensor() for _ in range(num_tensors)]
        return GgufHeader(len(self.data), metadata, self._place(raw_tensors, metadata))

    def _take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise GgufError(f"the header is cut off at byte {len(self.data)}")
        part = self.data[self.position : end]
        self.position = end
        return part

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _count(self) -> int:
        """Read how many things follow; each takes at least one byte."""
        count: int = self._number("Q")
        if count > len(self.data) - self.position:
            raise GgufError(f"the header announces {count} entries, more than the file has bytes")
        return count

    def _string(self) -> str:
        try:
            return self._take(self._count()).decode()
        except UnicodeDecodeError as problem:
            raise GgufError(f"a string before byte {self.position} is not UTF-8") from problem

    def _value(self, value_type: int) -> Any:
        if value_type == STRING_TYPE:
            return self._string()
        if value_type == ARRAY_TYPE:
            return self._array()
        if value_type not in SCALAR_CODES:
            raise GgufError(f"unknown value type {value_type} before byte {self.position}")
        return self._number(SCALAR_CODES[value_type])

    def _array(self) -> list[Any]:
        item_type, count = self._number("I"), self._count()
        if item_type == STRING_TYPE:
            return [self._string() for _ in range(count)]
        if item_type not in SCALAR_CODES:
            raise GgufError(f"unknown array type {item_type} before byte {self.position}")
        layout = f"<{count}{SCALAR_CODES[item_type]}"
        return list(struct.unpack(layout, self._take(struct.calcsize(layout))))

    def _raw_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, dimensions with the fastest first, type and offset from the start of the data."""
        name, num_dimensions = self._string(), self._number("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise GgufError(f"tensor {name} has {num_dimensions} dimensions")
        dimensions = tuple(self._number("Q") for _ in range(num_dimensions))
        return name, dimensions, self._number("I"), self._number("Q")

    def _place(
        self, raw_tensors: list[tuple[str, tuple[int, ...], int, int]], metadata: dict[str, Any]
    ) -> tuple[GgufTensor, ...]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"general.alignment is {alignment!r}")
        data_start = -(-self.position // alignment) * alignment
        tensors = tuple(_tensor(*raw, data_start) for raw in raw_tensors)
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise GgufError("two tensors have the same name")
        for tensor in tensors:
            if tensor.offset_bytes + tensor.num_bytes > len(self.data):
                raise GgufError(
                    f"the file is cut off: tensor {tensor.name} ends at byte {tensor.offset_bytes + tensor.num_bytes}, "
                    f"the file at {len(self.data)}"
                )
        return tensors


def _tensor(name: str, dimensions: tuple[int, ...], type_id: int, offset: int, data_start: int) -> GgufTensor:
    try:
        quantization = GGMLQuantizationType(type_id)
    except ValueError as problem:
        raise GgufError(f"tensor {name} has the unknown type {type_id}") from problem
    block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
    num_elements = 1
    for dimension in dimensions:
        num_elements *= dimension
    if num_elements == 0 or (dimensions and dimensions[0] % block_elements):
        raise GgufError(f"tensor {name} of type {quantization.name} cannot have the dimensions {list(dimensions)}")
    return GgufTensor(
        name=name,
        quantization=quantization.name,
        shape=dimensions[::-1],
        offset_bytes=data_start + offset,
        num_bytes=num_elements // block_elements * block_bytes,
    )
