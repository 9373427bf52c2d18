"""A GPU as a device, through torch.cuda; AMD's GPUs have the same interface there.

The share that the user gives is one of the whole memory, as in other servers: so that it means the same whatever runs
beside, what others already use is taken off it. What the driver and libraries took by themselves counts as used, which
is why the budget is computed after the largest step ran; what torch keeps for later allocations is given back first.
Each kind of GPU computes in 16 bits; float32 is for those who ask for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from octavo.kernels import registry
from octavo.protocol.config import CacheConfig, Dtype
from octavo.worker.device import MIB, TORCH_DTYPES, Event, Graph, MemoryBudget
from octavo.worker.step_upload import PackedUploader

FIRST_WITH_BFLOAT16 = (8, 0)  # compute capability
REGISTERED_FROM_BYTES = 64 * MIB
REGISTER_DEFAULT = 0  # cudaHostRegisterDefault


class CudaDevice:
    """GPU number `index` of this machine, of which this process uses no other."""

    uses_host_memory = False
    has_graphs = True
    records_steps = False
    packs_weights = False

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self.side_stream = torch.cuda.Stream()
        self.graph_pool = torch.cuda.graph_pool_handle()

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch_device)
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return f"{self.torch_device} {properties.name}, {properties.total_memory / MIB:.0f} MiB, sm_{major}{minor}"

    def select_dtype(self, asked: Dtype | None, stored: Dtype | None) -> tuple[torch.dtype, str]:
        """Return bfloat16 for whatever is not asked for or stored as float16; that one where there is no bfloat16."""
        has_bfloat16 = torch.cuda.get_device_capability(self.torch_device) >= FIRST_WITH_BFLOAT16
        wanted = asked or (Dtype.FLOAT16 if stored is Dtype.FLOAT16 else Dtype.BFLOAT16)
        if wanted is Dtype.BFLOAT16 and not has_bfloat16:
            return torch.float16, "this GPU does not compute in bfloat16, float16 is used"
        if asked is None and stored is Dtype.FLOAT32:
            return TORCH_DTYPES[wanted], "stored as float32; --dtype float32 keeps that"
        return TORCH_DTYPES[wanted], ""

    def select_kernels(self, is_deterministic: bool) -> dict[str, str]:
        import octavo.kernels.triton.backends  # noqa: F401 - registers the kernels; Triton is there on GPUs only

        return registry.select(*(("deterministic", "triton") if is_deterministic else ("triton",)))

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()  # what torch keeps for later can be taken as well
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def measure_peak_bytes(self, run: Callable[[], object]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_reserved()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - before_bytes

    def kv_budget(self, cache: CacheConfig, free_bytes: int, reserved_bytes: int) -> MemoryBudget:
        torch.cuda.empty_cache()
        left_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
        used_bytes = total_bytes - left_bytes
        share = f"{cache.gpu_memory_utilization:.0%} of the GPU's {total_bytes / MIB:.0f} MiB"
        return MemoryBudget(
            num_bytes=int(total_bytes * cache.gpu_memory_utilization) - used_bytes - reserved_bytes,
            reserved_bytes=reserved_bytes,
            free_bytes=left_bytes,
            share=f"{share}, of which {used_bytes / MIB:.0f} MiB are in use",
            advice="lower --max-model-len or raise --gpu-memory-utilization",
        )

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Take small memory from what torch keeps for reuse, which it rounds up to the next power of two.

        Large memory must be kept until the process ends: it is never unregistered.
        """
        if math.prod(shape) * dtype.itemsize < REGISTERED_FROM_BYTES:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        tensor = torch.empty(shape, dtype=dtype)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, REGISTER_DEFAULT))
        return tensor

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self.empty_host(tuple(tensor.shape), tensor.dtype)  # torch keeps such memory, so this is cheap
        return host.copy_(tensor, non_blocking=True)

    def make_uploader(self, num_bytes: int) -> PackedUploader:
        return PackedUploader(self, num_bytes)

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def on_side_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.side_stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.graph_pool, capture_error_mode="thread_local"):  # NCCL has threads
            result = run()
        return graph, result
