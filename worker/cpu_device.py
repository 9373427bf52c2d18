"""The CPU as a device: everything is done when the call returns, in the host's memory.

Its kernels are the compiled ones of `octavo.kernels.cpu`, with threads of their own, beside which torch keeps one;
where they were not compiled, torch computes with all threads. Workers on one machine share its memory, so each takes
its part of what is free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from octavo.kernels import registry
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.cpu.library import find_library
from octavo.protocol.config import CacheConfig, Dtype
from octavo.worker.device import TORCH_DTYPES, Graph, MemoryBudget
from octavo.worker.host import CPU_INFO, free_memory_bytes, has_native_bfloat16, measure_peak_growth_bytes
from octavo.worker.step_upload import DirectUploader

logger = logging.getLogger(__name__)

LOWER_MODEL_LEN = "lower --max-model-len or raise --memory-utilization"


class DoneEvent:
    """An event of a device that has always come there."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def wait(self) -> None:
        return


DONE = DoneEvent()


def select_cpu_dtype(asked: Dtype | None, stored: Dtype | None, cpu_info: Path = CPU_INFO) -> tuple[torch.dtype, str]:
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


class CpuDevice:
    """The part of the machine's CPU and memory that one of `num_local_workers` workers has."""

    torch_device = torch.device("cpu")
    uses_host_memory = True
    has_graphs = False

    def __init__(self, num_local_workers: int = 1, num_threads: int | None = None) -> None:
        """`num_threads` of the kernels; None: as many as torch has."""
        self.num_local_workers = num_local_workers
        self.num_threads = num_threads or torch.get_num_threads()
        self.has_own_kernels = False

    @property
    def records_steps(self) -> bool:
        return self.has_own_kernels

    @property
    def packs_weights(self) -> bool:
        return self.has_own_kernels

    def describe(self) -> str:
        return f"cpu with {self.num_threads} threads"

    def select_dtype(self, asked: Dtype | None, stored: Dtype | None) -> tuple[torch.dtype, str]:
        return select_cpu_dtype(asked, stored)

    def select_kernels(self, is_deterministic: bool) -> dict[str, str]:
        """Take the compiled kernels where there are any; like the references, they are deterministic."""
        if find_library() is None:
            logger.warning("octavo was installed without a C++ compiler: the slower kernels of torch compute")
            return {}
        import octavo.kernels.cpu.backends  # noqa: F401 - registers the kernels

        instruction_set = EXECUTOR.start(self.num_threads)
        torch.set_num_threads(1)
        self.has_own_kernels = True
        logger.info("CPU kernels for %s", instruction_set)
        return registry.select("cpu")

    def free_bytes(self) -> int:
        return free_memory_bytes() // self.num_local_workers

    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        return measure_peak_growth_bytes(run)

    def kv_budget(self, cache: CacheConfig, free_bytes: int, reserved_bytes: int) -> MemoryBudget:
        """Return a share of what was free, since on the host others need memory as well."""
        left_bytes = free_bytes - reserved_bytes
        return MemoryBudget(
            num_bytes=int(left_bytes * cache.memory_utilization),
            reserved_bytes=reserved_bytes,
            free_bytes=free_bytes,
            share=f"{cache.memory_utilization:.0%} of what is left",
            advice=LOWER_MODEL_LEN,
        )

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def make_uploader(self, num_bytes: int) -> DirectUploader:
        return DirectUploader()

    def record(self) -> DoneEvent:
        return DONE

    def on_side_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        return

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        raise NotImplementedError("a CPU has no graphs")


CPU_DEVICE = CpuDevice()
