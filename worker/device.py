"""What the CPU gives a worker: cores, memory, and which number formats it computes natively.

A container's limits count, not the machine's: the cgroup's memory limit and CPU quota, the affinity mask. Memory that
the page cache holds is free, because the kernel gives it back. Facts are read from the kernel's files at the moment
they are asked for; paths are arguments, so that tests can hand in other kernels. Rejected: torch's defaults, which
start one thread per core of the machine inside a container that may use two.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from octavo.protocol.config import DeviceKind, Dtype, ParallelConfig
from octavo.protocol.lifecycle import ExitCode, StartupError

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_FILES = Path("/proc/self")
CPU_INFO = Path("/proc/cpuinfo")
MIB = 2**20
RESET_PEAK = "5"  # proc(5), clear_refs: the peak of resident memory becomes the present value
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the last one is Arm's name
TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}


def select_device(parallel: ParallelConfig) -> torch.device:
    """Return the device of this worker; raises StartupError(USAGE) for what this build cannot run on."""
    if parallel.device is DeviceKind.CUDA:
        raise StartupError(ExitCode.USAGE, f"device {parallel.device} is not supported yet, only cpu")
    if parallel.tensor_parallel_size > 1:
        raise StartupError(
            ExitCode.USAGE, f"--tensor-parallel-size {parallel.tensor_parallel_size} is not supported yet, use 1"
        )
    return torch.device("cpu")


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


def set_threads(parallel: ParallelConfig) -> int:
    """Set the number of threads that kernels use in this process, and return it."""
    num_threads = parallel.num_threads or max(1, num_usable_cores() // parallel.tensor_parallel_size)
    torch.set_num_threads(num_threads)
    return num_threads


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


def out_of_memory(purpose: str, needed_bytes: int | None, advice: str) -> StartupError:
    """Return the error that says what is needed (None: not known), what is there, and which flag helps."""
    needed = "more" if needed_bytes is None else f"{needed_bytes / MIB:.1f} MiB"
    free = f"{free_memory_bytes() / MIB:.1f} MiB"
    return StartupError(
        ExitCode.OUT_OF_MEMORY, f"not enough memory for {purpose}: {needed} needed, {free} free; {advice}"
    )


def check_fits(purpose: str, needed_bytes: int, advice: str) -> None:
    """Raise StartupError(OUT_OF_MEMORY) when `needed_bytes` are not free."""
    if needed_bytes > free_memory_bytes():
        raise out_of_memory(purpose, needed_bytes, advice)


@contextlib.contextmanager
def explain_out_of_memory(purpose: str, needed_bytes: int | None, advice: str) -> Iterator[None]:
    """Turn a failed allocation inside the block (a limit that no file shows) into StartupError(OUT_OF_MEMORY)."""
    try:
        yield
    except MemoryError as problem:
        raise out_of_memory(purpose, needed_bytes, advice) from problem
    except RuntimeError as problem:
        if "can't allocate memory" not in str(problem):  # torch has no type of its own for this on the CPU
            raise
        raise out_of_memory(purpose, needed_bytes, advice) from problem


def has_native_bfloat16(cpu_info: Path = CPU_INFO) -> bool:
    """Return whether the CPU multiplies bfloat16 without converting it first."""
    for line in _read(cpu_info).splitlines():
        if line.startswith(("flags", "Features")):
            return not BFLOAT16_FLAGS.isdisjoint(line.split())
    return False


def select_dtype(asked: Dtype | None, stored: Dtype | None, cpu_info: Path = CPU_INFO) -> tuple[torch.dtype, str]:
    """Return the dtype to compute in, and in words why when it is not what was asked or stored.

    Without a wish, 16-bit weights stay 16 bits wide where the CPU computes with them; a checkpoint that names no dtype
    counts as one (GGUF files are quantised further than that). float16 is not computed on CPUs: bfloat16 stands in
    for it where that is native, since it has the same size, else float32.
    """
    native = Dtype.BFLOAT16 if has_native_bfloat16(cpu_info) else Dtype.FLOAT32
    if asked is Dtype.FLOAT16:
        return TORCH_DTYPES[native], f"float16 is not computed on CPUs, {native} is used"
    if asked is not None:
        return TORCH_DTYPES[asked], ""
    if stored is Dtype.FLOAT32:
        return torch.float32, ""
    wanted = stored or Dtype.BFLOAT16
    return TORCH_DTYPES[native], f"this CPU has no native {wanted}" if native is not wanted else ""
