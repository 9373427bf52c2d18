"""Where a kernel in Triton's interpreter may read and write.

Three rules for every element that an instruction touches with its mask set:
1. it is an element of a tensor argument of the launch (of the view that was passed, not of the storage around it);
2. no two programs of a launch write it, and no instruction writes it twice;
3. no program reads it that another one writes, in either order.
The interpreter runs programs one after the other, so without rules 2 and 3 it would hide every race. Atomic operations
may meet on an element, but not with plain ones. Rejected: guard values around tensors, which see stores only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

NOBODY = 0
ATOMIC = -1
SEVERAL = -2


class MemoryFault(RuntimeError):  # noqa: N818 - the base of the two below
    """A kernel did with memory what a GPU would not forgive."""


class OutOfBoundsError(MemoryFault):
    """An access outside every tensor argument."""


class RaceError(MemoryFault):
    """The result depends on the order of programs, or of the lanes of one store."""


@dataclass
class Traffic:
    """What the launches moved, in bytes, counting every access as the kernel makes it."""

    num_launches: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0


@dataclass
class Region:
    """The memory of tensor arguments that overlap; `first` and `last` are addresses, the last exclusive."""

    first: int
    last: int
    name: str
    granule_bytes: int
    tensors: list[torch.Tensor]
    allowed: np.ndarray | None = None
    writers: np.ndarray = field(init=False)
    readers: np.ndarray = field(init=False)

    def prepare(self) -> None:
        num_granules = -(-(self.last - self.first) // self.granule_bytes)
        self.writers = np.zeros(num_granules, np.int32)
        self.readers = np.zeros(num_granules, np.int32)
        if not any(covers(tensor, self.first, self.last) for tensor in self.tensors):
            self.allowed = np.zeros(num_granules, bool)
            for tensor in self.tensors:
                self._allow(tensor, self.allowed)

    def _allow(self, tensor: torch.Tensor, allowed: np.ndarray) -> None:
        width = tensor.element_size() // self.granule_bytes
        start = (tensor.data_ptr() - self.first) // self.granule_bytes
        np.lib.stride_tricks.as_strided(
            allowed[start:], (*tensor.shape, width), (*(stride * width for stride in tensor.stride()), 1)
        )[...] = True


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size()


def covers(tensor: torch.Tensor, first: int, last: int) -> bool:
    return extent_of(tensor) == (first, last) and tensor.numel() * tensor.element_size() == last - first


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item, name)
    elif isinstance(value, torch.Tensor):
        if value.numel():
            yield name, value
    elif hasattr(value, "base"):  # a tensor descriptor, or a tensor that is reinterpreted
        yield from tensors_in(value.base, name)


def regions_of(arguments: Mapping[str, Any]) -> list[Region]:
    regions: list[Region] = []
    found = [pair for name, value in arguments.items() for pair in tensors_in(value, name)]
    for name, tensor in sorted(found, key=lambda pair: extent_of(pair[1])):
        first, last = extent_of(tensor)
        if regions and first < regions[-1].last:
            region = regions[-1]
            region.last = max(region.last, last)
            region.name += f"|{name}"
            region.granule_bytes = min(region.granule_bytes, tensor.element_size())
            region.tensors.append(tensor)
        else:
            regions.append(Region(first, last, name, tensor.element_size(), [tensor]))
    for region in regions:
        region.prepare()
    return regions


class MemoryChecks:
    """The rules, applied to one launch after the other."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.regions: list[Region] = []
        self.firsts = np.zeros(0, np.uint64)
        self.lasts = np.zeros(0, np.uint64)

    def start_launch(self, arguments: Mapping[str, Any]) -> None:
        self.traffic.num_launches += 1
        self.regions = regions_of(arguments)
        self.firsts = np.array([region.first for region in self.regions], np.uint64)
        self.lasts = np.array([region.last for region in self.regions], np.uint64)

    def load(self, builder: Any, pointers: Any, mask: np.ndarray) -> None:
        program = number_of(builder)
        for region, granules, size_bytes in self._touched("load", builder, pointers, mask):
            self.traffic.loaded_bytes += size_bytes
            self._refuse_others(region, region.writers[granules], program, "reads", "wrote")
            readers = region.readers[granules]
            region.readers[granules] = np.where((readers == NOBODY) | (readers == program), program, SEVERAL)

    def store(self, builder: Any, pointers: Any, mask: np.ndarray) -> None:
        program = number_of(builder)
        for region, granules, size_bytes in self._touched("store", builder, pointers, mask):
            self.traffic.stored_bytes += size_bytes
            if np.unique(granules).size != granules.size:
                raise RaceError(f"program {builder.grid_idx} writes an element of {region.name} twice at once")
            self._refuse_others(region, region.writers[granules], program, "writes", "wrote")
            self._refuse_others(region, region.readers[granules], program, "writes", "read")
            region.writers[granules] = program

    def atomic(self, builder: Any, pointers: Any, mask: np.ndarray) -> None:
        for region, granules, size_bytes in self._touched("atomic operation", builder, pointers, mask):
            self.traffic.loaded_bytes += size_bytes
            self.traffic.stored_bytes += size_bytes
            self._refuse_others(region, region.writers[granules], ATOMIC, "changes", "wrote")
            self._refuse_others(region, region.readers[granules], ATOMIC, "changes", "read")
            region.writers[granules] = ATOMIC

    def _refuse_others(self, region: Region, marks: np.ndarray, program: int, does: str, did: str) -> None:
        others = marks[(marks != NOBODY) & (marks != program)]
        if others.size:
            other = {ATOMIC: "an atomic operation", SEVERAL: "several"}.get(int(others[0]), f"number {others[0] - 1}")
            mine = "an atomic operation" if program == ATOMIC else f"program number {program - 1}"
            raise RaceError(f"{mine} {does} an element of {region.name} that {other} of the same launch {did}")

    def _touched(
        self, kind: str, builder: Any, pointers: Any, mask: np.ndarray
    ) -> Iterator[tuple[Region, np.ndarray, int]]:
        """The regions that an instruction touches, with the granules in them."""
        width_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.broadcast_to(pointers.data, np.shape(mask))[np.asarray(mask)]
        if not addresses.size:
            return
        places = np.searchsorted(self.firsts, addresses, side="right") - 1
        inside = places >= 0
        if inside.any():
            inside &= addresses + np.uint64(width_bytes) <= self.lasts[places]
        if not inside.all():
            raise OutOfBoundsError(self._describe(kind, builder, addresses[~inside]))
        for place in np.unique(places):
            region = self.regions[place]
            here = addresses[places == place]
            granules = ((here - self.firsts[place]) // np.uint64(region.granule_bytes)).astype(np.int64)
            num_parts = max(1, width_bytes // region.granule_bytes)
            if num_parts > 1:
                granules = (granules[:, None] + np.arange(num_parts)).ravel()
            if region.allowed is not None and not region.allowed[granules].all():
                refused = here.repeat(num_parts)[~region.allowed[granules]]
                raise OutOfBoundsError(self._describe(kind, builder, refused))
            yield region, granules, here.size * width_bytes

    def _describe(self, kind: str, builder: Any, addresses: np.ndarray) -> str:
        place = int(np.searchsorted(self.firsts, addresses[0], side="right")) - 1
        text = f"{kind} of {addresses.size} elements outside every tensor argument by program {builder.grid_idx}"
        if place < 0:
            return f"{text}, below all of them"
        region = self.regions[place]
        offset_bytes = int(addresses[0]) - region.first
        return f"{text}, the first at byte {offset_bytes} of {region.name} ({region.last - region.first} bytes)"


def number_of(builder: Any) -> int:
    """1 and up, in the order in which the interpreter runs the programs."""
    _, size_y, size_z = builder.grid_dim
    x, y, z = builder.grid_idx
    return 1 + (x * size_y + y) * size_z + z
