"""Which device a worker gets, in what it computes there, how much memory it takes, and what it says when it cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from octavo.protocol.config import CacheConfig, DeviceKind, Dtype, ParallelConfig
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker import cpu_device, device
from octavo.worker.cpu_device import CpuDevice, select_cpu_dtype
from octavo.worker.cuda_device import CudaDevice
from octavo.worker.device_selection import select_device

GIB = 2**30


class GpuName(NamedTuple):
    name: str
    total_memory: int


class FakeCuda:
    """The facts that torch.cuda tells."""

    def __init__(self, monkeypatch) -> None:
        self.num_gpus = 2
        self.capability = (9, 0)
        self.memory = (60 * GIB, 80 * GIB)
        self.selected: list[torch.device] = []
        facts = {
            "is_available": lambda: self.num_gpus > 0,
            "device_count": lambda: self.num_gpus,
            "set_device": self.selected.append,
            "Stream": object,
            "graph_pool_handle": object,
            "empty_cache": lambda: None,
            "get_device_capability": lambda device: self.capability,
            "get_device_properties": lambda device: GpuName("H100", 80 * GIB),
            "mem_get_info": lambda device: self.memory,
        }
        for name, fact in facts.items():
            monkeypatch.setattr(torch.cuda, name, fact)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.mark.parametrize(
    ("asked", "stored", "native", "plain", "says_why"),
    [
        (None, None, torch.bfloat16, torch.float32, (False, True)),
        (None, Dtype.BFLOAT16, torch.bfloat16, torch.float32, (False, True)),
        (None, Dtype.FLOAT16, torch.bfloat16, torch.float32, (True, True)),
        (None, Dtype.FLOAT32, torch.float32, torch.float32, (False, False)),
        (Dtype.FLOAT32, Dtype.BFLOAT16, torch.float32, torch.float32, (False, False)),
        (Dtype.BFLOAT16, Dtype.FLOAT32, torch.bfloat16, torch.bfloat16, (False, False)),
        (Dtype.FLOAT16, None, torch.bfloat16, torch.float32, (True, True)),
    ],
)
def test_dtype_by_wish_checkpoint_and_cpu(tmp_path, asked, stored, native, plain, says_why):
    path = tmp_path / "cpuinfo"
    for flags, expected, says in (("avx512_bf16", native, says_why[0]), ("avx2", plain, says_why[1])):
        path.write_text(f"flags : {flags}\n")
        dtype, reason = select_cpu_dtype(asked, stored, path)
        assert dtype is expected
        assert bool(reason) is says


@pytest.mark.parametrize(
    ("asked", "stored", "new", "old", "says_why"),
    [
        (None, None, torch.bfloat16, torch.float16, (False, True)),
        (None, Dtype.BFLOAT16, torch.bfloat16, torch.float16, (False, True)),
        (None, Dtype.FLOAT16, torch.float16, torch.float16, (False, False)),
        (None, Dtype.FLOAT32, torch.bfloat16, torch.float16, (True, True)),
        (Dtype.FLOAT32, Dtype.BFLOAT16, torch.float32, torch.float32, (False, False)),
        (Dtype.BFLOAT16, Dtype.FLOAT16, torch.bfloat16, torch.float16, (False, True)),
        (Dtype.FLOAT16, Dtype.BFLOAT16, torch.float16, torch.float16, (False, False)),
    ],
)
def test_dtype_by_wish_checkpoint_and_gpu(cuda, asked, stored, new, old, says_why):
    gpu = CudaDevice(0)
    for capability, expected, says in (((8, 0), new, says_why[0]), ((7, 5), old, says_why[1])):
        cuda.capability = capability
        dtype, reason = gpu.select_dtype(asked, stored)
        assert dtype is expected
        assert bool(reason) is says


def test_a_worker_gets_the_gpu_of_its_number_on_its_node(cuda):
    parallel = ParallelConfig(
        tensor_parallel_size=4, num_nodes=2, node_rank=1, master_address="a", cluster_key_file="key"
    )
    for rank, index in ((0, 0), (1, 1), (2, 0), (3, 1)):
        gpu = select_device(parallel, rank)
        assert gpu.torch_device == torch.device("cuda", index)
        assert cuda.selected[-1] == gpu.torch_device
    assert gpu.describe() == "cuda:1 H100, 81920 MiB, sm_90"


def test_the_cpu_where_there_is_no_gpu_or_where_it_is_asked_for(cuda):
    assert isinstance(select_device(ParallelConfig(device=DeviceKind.CPU), 0), CpuDevice)
    cuda.num_gpus = 0
    assert isinstance(select_device(ParallelConfig(), 0), CpuDevice)


@pytest.mark.parametrize(
    ("parallel", "num_gpus", "words"),
    [
        (
            ParallelConfig(device=DeviceKind.CUDA),
            0,
            r"--device cuda: torch .* was built for CPUs only; use --device cpu",
        ),
        (
            ParallelConfig(tensor_parallel_size=3),
            2,
            "--tensor-parallel-size 3 needs 3 GPUs on each node, this one has 2",
        ),
    ],
)
def test_gpus_that_are_not_there(cuda, parallel, num_gpus, words):
    cuda.num_gpus = num_gpus
    with pytest.raises(StartupError, match=words) as caught:
        select_device(parallel, 0)
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_gpu_build_without_a_gpu_says_so(cuda, monkeypatch):
    cuda.num_gpus = 0
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(StartupError, match="torch finds no GPU"):
        select_device(ParallelConfig(device=DeviceKind.CUDA), 0)


def test_the_share_of_a_gpu_is_one_of_its_whole_memory(cuda):
    """What is in use, whoever uses it, is taken off; and so is what steps take."""
    budget = CudaDevice(0).kv_budget(CacheConfig(gpu_memory_utilization=0.75), 0, reserved_bytes=3 * GIB)
    assert budget.num_bytes == (60 - 20 - 3) * GIB
    assert budget.free_bytes == 60 * GIB
    assert "75% of the GPU's 81920 MiB, of which 20480 MiB are in use" in budget.share
    assert "--gpu-memory-utilization" in budget.advice


def test_workers_on_one_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(cpu_device, "free_memory_bytes", lambda: 9 * GIB)
    assert CpuDevice(3).free_bytes() == 3 * GIB


def test_kernels_of_a_gpu_are_chosen_by_mode(cuda, monkeypatch):
    chosen = []
    monkeypatch.setattr("octavo.kernels.registry.select", lambda *backends: chosen.append(backends) or {})
    for is_deterministic in (False, True):
        CudaDevice(0).select_kernels(is_deterministic)
    assert chosen == [("triton",), ("deterministic", "triton")]


def test_too_little_memory_says_needed_free_and_flag(monkeypatch):
    monkeypatch.setattr(device, "free_memory_bytes", lambda: 3 * device.MIB)
    device.check_fits("the weights", 3 * device.MIB, "lower --this")
    device.check_fits("the weights", 4 * device.MIB, "lower --this", free_bytes=4 * device.MIB)
    for free_bytes in (None, 3 * device.MIB):
        with pytest.raises(StartupError) as caught:
            device.check_fits("the weights", 4 * device.MIB, "lower --this", free_bytes)
        assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
        for words in ("the weights", "4.0 MiB needed", "3.0 MiB free", "lower --this"):
            assert words in caught.value.message


def test_a_failed_allocation_is_too_little_memory():
    with pytest.raises(StartupError) as caught, device.explain_out_of_memory("x", 2**60, "lower --this"):
        torch.empty(2**60, dtype=torch.uint8)
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
    with pytest.raises(StartupError), device.explain_out_of_memory("x", 2**60, "lower --this", 5):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
    with pytest.raises(RuntimeError, match="something else"), device.explain_out_of_memory("x", None, ""):
        raise RuntimeError("something else")


def test_large_host_memory_is_taken_as_it_is(cuda, monkeypatch):
    """Torch's own pinned memory comes in powers of two: a host tier of 65 GiB would take 128."""
    calls = []
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *args: calls.append(args))
    )
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    tensor = CudaDevice(0).empty_host((65, 2**20), torch.uint8)
    assert calls == [(tensor.data_ptr(), 65 * 2**20, 0)]


def test_small_host_memory_comes_from_what_torch_keeps(cuda, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: asked.append(kwargs))
    CudaDevice(0).empty_host((3, 5), torch.int64)
    assert asked == [{"dtype": torch.int64, "pin_memory": True}]
