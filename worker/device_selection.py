"""Which device a worker gets, and how many threads its kernels may use on the host."""

from __future__ import annotations

import torch

from octavo.protocol.config import DeviceKind, ParallelConfig
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.cpu_device import CpuDevice
from octavo.worker.cuda_device import CudaDevice
from octavo.worker.device import Device
from octavo.worker.host import num_usable_cores


def set_threads(parallel: ParallelConfig) -> int:
    """Set the number of threads that the host's kernels use in this process, and return it."""
    num_threads = parallel.num_threads or max(1, num_usable_cores() // parallel.num_local_workers)
    torch.set_num_threads(num_threads)
    return num_threads


def select_device(parallel: ParallelConfig, rank: int) -> Device:
    """Return the device of worker `rank`: the GPU of its number on this node, or its part of the CPU.

    Raises StartupError(USAGE) when GPUs are asked for and there are none, or fewer than workers on this node.
    """
    kind = parallel.device
    if kind is DeviceKind.AUTO:
        kind = DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU
    if kind is DeviceKind.CPU:
        return CpuDevice(parallel.num_local_workers)
    if not torch.cuda.is_available():
        raise StartupError(ExitCode.USAGE, f"--device cuda: {_why_no_gpu()}; use --device cpu")
    num_gpus = torch.cuda.device_count()
    if parallel.num_local_workers > num_gpus:
        raise StartupError(
            ExitCode.USAGE,
            f"--tensor-parallel-size {parallel.tensor_parallel_size} needs {parallel.num_local_workers} GPUs on each "
            f"node, this one has {num_gpus}",
        )
    return CudaDevice(rank % parallel.num_local_workers)


def _why_no_gpu() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} was built for CPUs only"
    return "torch finds no GPU"
