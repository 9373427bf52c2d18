"""Compiles what the wrappers of the kernels would launch, for a GPU that is not there, and reads what came out.

The wrappers run as they are, on fake tensors, under a driver that names the target; each launch compiles and does not
run. So what is checked are the specialisations that a worker would launch: alignment of pointers, strides of one,
arguments that are None, tiles chosen by shape. A process serves one target, because compiled kernels are kept per
function. Rejected: signatures written by hand, which drift from the wrappers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from aot_targets import Target
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.driver import DriverBase
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

ALIGNMENT_BYTES = 256  # of every tensor that torch allocates on a GPU
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class TargetDriver(DriverBase):
    """A driver for a GPU that is not there."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return self.target.gpu

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_interface(self) -> None:
        return None

    def get_benchmarker(self) -> None:
        return None

    def get_empty_cache_for_benchmark(self) -> None:
        return None

    def clear_cache(self, cache: Any) -> None:
        pass


@dataclass(frozen=True)
class Launch:
    """One launch that a wrapper made: the name of the kernel, the grid, and what it was compiled to."""

    kernel_name: str
    grid: tuple[int, ...]
    kernel: CompiledKernel

    @property
    def num_programs(self) -> int:
        result = 1
        for size in self.grid:
            result *= size
        return result


@contextmanager
def compiled_launches(target: Target) -> Iterator[list[Launch]]:
    """Tensors made in the context are fake; the list receives every launch made there."""
    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> CompiledKernel:
        kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
        size = grid(dict(zip(function.arg_names, args, strict=False)) | kwargs) if callable(grid) else grid
        launches.append(Launch(function.fn.__name__, tuple(size), kernel))
        return kernel

    triton.runtime.driver.set_active(TargetDriver(target))
    JITFunction.run = compile_only
    FakeTensor.data_ptr = lambda tensor: ALIGNMENT_BYTES + tensor.storage_offset() * tensor.element_size()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield launches
    finally:
        JITFunction.run = run
        del FakeTensor.data_ptr


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes, and which of the instructions that matter it has.

    Attributes:
        stack_bytes: per thread; not 0 when registers were spilled or an array did not fit into them.
        num_spills: registers that the compiler says it moved to memory; AMD's may be accumulators instead.
        has_dot: the kernel has a matrix product that is not asked to be exact fp32.
        tensor_core: the instruction that computes it, or "".
        num_wide_loads: instructions that load 16 bytes per thread.
        num_async_copies: those of them that go to shared memory while the thread works on.
    """

    num_warps: int
    num_stages: int
    num_registers: int
    stack_bytes: int
    num_spills: int
    shared_bytes: int
    has_dot: bool
    tensor_core: str
    num_wide_loads: int
    num_async_copies: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def resources_of(kernel: CompiledKernel, target: Target) -> Resources:
    assembly = kernel.asm["ptx"] if target.is_nvidia else kernel.asm["amdgcn"]
    usage = nvidia_usage(kernel.asm["cubin"]) if target.is_nvidia else amd_usage(assembly)
    dots = re.findall(r"tt\.dot(?:_scaled)? .*", kernel.asm["ttir"])
    found = [name for name, pattern in target.tensor_core_patterns.items() if re.search(pattern, assembly)]
    copies = len(re.findall(r"cp\.async\.cg\.shared\.global .*0x10|cp\.async\.bulk\.tensor", assembly))
    wide = r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64" if target.is_nvidia else r"(?:global|buffer)_load_dwordx4"
    return Resources(
        num_warps=kernel.metadata.num_warps,
        num_stages=kernel.metadata.num_stages,
        shared_bytes=kernel.metadata.shared,
        has_dot=any("tf32" in dot or "xf32> *" not in dot for dot in dots),
        tensor_core=found[0] if found else "",
        num_wide_loads=copies + len(re.findall(wide, assembly)),
        num_async_copies=copies,
        **usage,
    )


def nvidia_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise ValueError(f"no resource usage in: {text}")
    registers, stack, local = map(int, found.groups())
    return {"num_registers": registers, "stack_bytes": stack + local, "num_spills": (stack + local) // 4}


def amd_usage(assembly: str) -> dict[str, int]:
    def value(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if found is None:
            raise ValueError(f"no {name} in the assembly")
        return int(found.group(1))

    return {
        "num_registers": value("vgpr_count"),
        "stack_bytes": value("private_segment_fixed_size"),
        "num_spills": value("vgpr_spill_count") + value("sgpr_spill_count"),
    }
