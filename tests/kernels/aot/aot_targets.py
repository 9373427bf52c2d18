"""The GPUs for which kernels are compiled, and what each of them has: all figures are the vendors'.

Sources: CUDA C++ programming guide, "technical specifications per compute capability"; AMD CDNA 3 ISA guide and the
LLVM AMDGPU guide for gfx942.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget

WARP_REGISTERS = 256  # an NVIDIA multiprocessor hands out a warp's registers in units of this many
RESERVED_SHARED_BYTES = 1024  # that a block takes beside its own


@dataclass(frozen=True)
class Target:
    """One architecture.

    Attributes:
        gpu: what Triton compiles for.
        max_block_shared_bytes: shared memory that one block may ask for.
        shared_bytes: shared memory of a multiprocessor.
        max_warps: resident warps of a multiprocessor.
        tensor_core_patterns: name -> regular expression in the assembly.
    """

    name: str
    gpu: GPUTarget
    max_block_shared_bytes: int
    shared_bytes: int
    max_warps: int
    tensor_core_patterns: dict[str, str]
    registers: int = 65536

    @property
    def is_nvidia(self) -> bool:
        return self.gpu.backend == "cuda"

    def resident_blocks(self, num_warps: int, num_registers: int, shared_bytes: int) -> int:
        """Blocks of a kernel that fit into one multiprocessor at once; 0 when not even one does."""
        by_shared = (
            self.shared_bytes // (shared_bytes + (RESERVED_SHARED_BYTES if self.is_nvidia else 0))
            if shared_bytes
            else self.max_warps
        )
        if self.is_nvidia:
            per_warp = -(-max(num_registers, 16) * 32 // WARP_REGISTERS) * WARP_REGISTERS
            return min(self.registers // (per_warp * num_warps), by_shared, self.max_warps // num_warps, 32)
        waves_per_simd = min(8, 512 // (-(-max(num_registers, 8) // 8) * 8))
        return min(4 * waves_per_simd // num_warps, by_shared)


_MMA = {"mma": r"\bmma\.sync"}

TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", GPUTarget("cuda", 80, 32), 166912, 167936, 64, _MMA),
        Target("sm_90", GPUTarget("cuda", 90, 32), 232448, 233472, 64, {"wgmma": r"wgmma\.mma_async", **_MMA}),
        Target("sm_100", GPUTarget("cuda", 100, 32), 232448, 233472, 64, {"tcgen05": r"tcgen05\.mma", **_MMA}),
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 65536, 65536, 32, {"mfma": r"\bv_mfma"}),
    )
}
