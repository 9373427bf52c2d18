"""What the machine gives a worker: cores, memory and its pages, and whether the CPU computes with bfloat16.

A container's limits count, not the machine's: the cgroup's memory limit and CPU quota, the affinity mask. Memory that
the page cache holds is free, because the kernel gives it back. Facts are read from the kernel's files at the moment
they are asked for; paths are arguments, so that tests can hand in other kernels. Rejected: torch's defaults, which
start one thread per core of the machine inside a container that may use two.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_FILES = Path("/proc/self")
CPU_INFO = Path("/proc/cpuinfo")
HUGE_PAGE_BYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap does not name it
RESET_PEAK = "5"  # proc(5), clear_refs: the peak of resident memory becomes the present value
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is Arm's name


def _read(path: Path) -> str:
    """Return the text of a kernel file, empty when it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _cgroup_directories(controller: str, root: Path, process_files: Path) -> list[Path]:
    """Return where the limits of this process's cgroup may be, innermost first; version 1 and 2.

    Inside a container the path that the process sees may not exist below its own mount, so that the parents up to the
    root are listed too; all of them limit it.
    """
    directories: list[Path] = []
    for line in _read(process_files / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            base = root / controller if controllers else root
            inside = base / path.lstrip("/")
            directories += [folder for folder in (inside, *inside.parents) if folder.is_relative_to(base)]
    return directories


def num_usable_cores(root: Path = CGROUP_ROOT, process_files: Path = PROCESS_FILES) -> int:
    """Return the whole cores that this process may use: affinity, bounded by the cgroup's CPU quota; at least 1."""
    num_cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for directory in _cgroup_directories("cpu", root, process_files):
        quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        fields = (_read(directory / "cpu.max") or f"{quota} {period}").split()
        if len(fields) == 2 and fields[0].isdigit() and int(fields[1]) > 0:  # no limit is "max", or -1
            num_cores = min(num_cores, int(fields[0]) / int(fields[1]))
    return max(1, int(num_cores))


def _cgroup_free_bytes(root: Path, process_files: Path) -> Iterator[int]:
    for directory in _cgroup_directories("memory", root, process_files):
        limit = _read(directory / "memory.max") or _read(directory / "memory.limit_in_bytes")
        usage = _read(directory / "memory.current") or _read(directory / "memory.usage_in_bytes")
        if limit.strip().isdigit() and usage.strip().isdigit():
            yield int(limit) - int(usage) + _page_cache_bytes(_read(directory / "memory.stat"))


def _page_cache_bytes(memory_stat: str) -> int:
    """Return what a cgroup's page cache holds; version 1 counts the whole subtree in its `total_` lines."""
    values = dict(line.split() for line in memory_stat.splitlines())
    prefix = "total_" if "total_inactive_file" in values else ""
    return sum(int(values.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


def _advise(start: int, end: int, advice: int) -> bool:
    """Give the system advice about whole pages of memory; return whether it takes it."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise(start, end - start, advice) == 0


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Ask the system for huge pages in a range of memory that has not been written yet, where it has them."""
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end > start and hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(start, end, mmap.MADV_HUGEPAGE)  # without it, all works as well


def take_pages(address: int, num_bytes: int) -> bool:
    """Give a range its pages as a write would, without writing; return whether the system does that."""
    return _advise(address // mmap.PAGESIZE * mmap.PAGESIZE, address + num_bytes, MADV_POPULATE_WRITE)


def free_memory_bytes(root: Path = CGROUP_ROOT, process_files: Path = PROCESS_FILES) -> int:
    """Return the bytes that this process can still take: of the machine, bounded by each limit of its cgroups."""
    return max(0, min([psutil.virtual_memory().available, *_cgroup_free_bytes(root, process_files)]))


def _peak_resident_bytes() -> int:
    if match := re.search(r"VmHWM:\s+(\d+) kB", _read(PROCESS_FILES / "status")):
        return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_peak_growth_bytes(run: Callable[[], object]) -> int:
    """Return how far this process's memory rises above its present size while `run` works."""
    with contextlib.suppress(OSError):  # then an earlier peak may hide a part of the growth
        (PROCESS_FILES / "clear_refs").write_text(RESET_PEAK)
    before_bytes = psutil.Process().memory_info().rss
    run()
    return max(0, _peak_resident_bytes() - before_bytes)


def has_native_bfloat16(cpu_info: Path = CPU_INFO) -> bool:
    """Return whether the CPU multiplies bfloat16 without converting it first."""
    for line in _read(cpu_info).splitlines():
        if line.startswith(("flags", "Features")):
            return not BFLOAT16_FLAGS.isdisjoint(line.split())
    return False
