"""The memory of packed weights: apart, aligned, zero, and in pieces that may have huge pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from octavo.worker.host import HUGE_PAGE_BYTES
from octavo.worker.layers.weight_memory import PIECE_BYTES, WeightMemory


def test_weights_lie_apart_and_are_zero() -> None:
    memory = WeightMemory(torch.device("cpu"))
    sizes = [1, 64, 65, 1000, PIECE_BYTES - 5000, 3000, PIECE_BYTES + 7, 12]
    weights = [memory.take(size) for size in sizes]
    for number, weight in enumerate(weights):
        assert weight.data_ptr() % 64 == 0
        assert not weight.any()
        weight.fill_(number + 1)
    for number, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        assert weight.shape == (size,)
        assert (weight == number + 1).all()


def test_neighbours_share_a_huge_page() -> None:
    memory = WeightMemory(torch.device("cpu"))
    first, second = memory.take(100), memory.take(100)
    assert first.data_ptr() % HUGE_PAGE_BYTES == 0
    assert second.data_ptr() - first.data_ptr() == 128


def mapping_of(address: int) -> str:
    """Return what the kernel says of the mapping of an address (proc(5), smaps)."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        start, end = (int(part, 16) for part in mapping.split(" ", 1)[0].split("-"))
        if start <= address < end:
            return mapping
    raise LookupError(hex(address))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no such pages")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="nor has this kernel")
def test_huge_pages_are_asked_for() -> None:
    weight = WeightMemory(torch.device("cpu")).take(3 * HUGE_PAGE_BYTES)
    flags = re.search(r"^VmFlags:(.*)$", mapping_of(weight.data_ptr()), re.MULTILINE)
    assert flags is not None
    assert "hg" in flags[1].split()


def test_other_devices_take_no_host_memory() -> None:
    weight = WeightMemory(torch.device("meta")).take(10**15)
    assert weight.is_meta
    assert weight.shape == (10**15,)
