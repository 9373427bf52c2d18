"""Cores, memory and number formats, read from kernel files of several kinds of containers."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest
import torch

from octavo.protocol.config import ParallelConfig
from octavo.worker import device_selection, host

GIB = 2**30


@pytest.fixture
def kernel(tmp_path):
    """Writes files of a fake kernel; the machine itself has plenty."""

    def write(files: dict[str, str]):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {"root": tmp_path / "cgroup", "process_files": tmp_path / "proc"}

    return write


@pytest.fixture
def machine(monkeypatch):
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=100 * GIB))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


VERSION_2 = {
    "proc/cgroup": "0::/pod/container\n",
    "cgroup/pod/container/memory.max": "max\n",
    "cgroup/pod/container/memory.current": f"{3 * GIB}\n",
    "cgroup/pod/container/cpu.max": "max 100000\n",
    "cgroup/pod/memory.max": f"{8 * GIB}\n",
    "cgroup/pod/memory.current": f"{5 * GIB}\n",
    "cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\n",
    "cgroup/pod/cpu.max": "250000 100000\n",
}
VERSION_1 = {
    "proc/cgroup": "9:cpuset:/other\n4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n",
    "cgroup/memory/box/memory.limit_in_bytes": f"{8 * GIB}\n",
    "cgroup/memory/box/memory.usage_in_bytes": f"{5 * GIB}\n",
    "cgroup/memory/box/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
    "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "cgroup/memory/memory.usage_in_bytes": f"{50 * GIB}\n",
    "cgroup/cpu/box/cpu.cfs_quota_us": "150000\n",
    "cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
}
UNLIMITED = {
    "proc/cgroup": "1:cpu:/\n0::/\n",
    "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "cgroup/cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("files", "num_cores", "free_gib"),
    [(VERSION_2, 2, 5), (VERSION_1, 1, 4), (UNLIMITED, 8, 100), ({}, 8, 100)],
    ids=["version 2", "version 1", "unlimited", "no cgroups"],
)
def test_limits_of_the_container_count(kernel, files, num_cores, free_gib):
    places = kernel(files)
    assert host.num_usable_cores(**places) == num_cores
    assert host.free_memory_bytes(**places) == free_gib * GIB


@pytest.mark.usefixtures("machine")
def test_a_full_container_has_no_memory_rather_than_less(kernel):
    full = {**VERSION_2, "cgroup/pod/memory.current": f"{20 * GIB}\n"}
    assert host.free_memory_bytes(**kernel(full)) == 0


def test_threads_are_the_share_of_a_worker(monkeypatch):
    monkeypatch.setattr(device_selection, "num_usable_cores", lambda: 6)
    before = torch.get_num_threads()
    try:
        assert device_selection.set_threads(ParallelConfig()) == torch.get_num_threads() == 6
        assert device_selection.set_threads(ParallelConfig(tensor_parallel_size=4)) == torch.get_num_threads() == 1
        assert device_selection.set_threads(ParallelConfig(num_threads=3)) == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


PEAK_GROWTH = """
import torch
from octavo.worker import host
num_bytes = 200 * 2**20
torch.ones(2 * num_bytes, dtype=torch.uint8)  # an earlier, higher peak must not hide the later one
for run in (lambda: torch.ones(num_bytes, dtype=torch.uint8), lambda: None):
    print(host.measure_peak_growth_bytes(run) / num_bytes)
"""


def test_peak_growth_counts_what_was_freed_again():
    """In a process of its own: what other tests left would be freed, or taken back by the system, while we measure."""
    output = subprocess.run([sys.executable, "-c", PEAK_GROWTH], capture_output=True, text=True, check=True).stdout
    with_allocation, without = map(float, output.split())
    assert 0.9 < with_allocation < 1.5
    assert without < 0.1


@pytest.mark.parametrize(
    ("cpu_info", "is_native"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("model name\t: avx512_bf16\n", False),
        ("", False),
    ],
)
def test_native_bfloat16(tmp_path, cpu_info, is_native):
    path = tmp_path / "cpuinfo"
    path.write_text(cpu_info)
    assert host.has_native_bfloat16(path) is is_native
