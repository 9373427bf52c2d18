"""Devices and models whose step times we can work out, each number with where it comes from.

GPU figures are the vendor's peaks (dense, without sparsity) and the share of them that good kernels reach; that share
is our assumption, the same for all of them. The CPU's figures are measured, so their share is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """What bounds a step.

    Attributes:
        link_bytes_per_s: copies between device and host memory, in one direction.
        compute_share, memory_share, link_share: of the three peaks, what is reached.
        step_overhead_s: device time of a step that computes nothing: launches, sampling.
        host_s: from a result to the next step on the device, when none was sent ahead: scheduling and messages.
        max_num_batched_tokens: default token budget of a step.
    """

    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    compute_share: float = 0.6
    memory_share: float = 0.8
    link_share: float = 0.8
    step_overhead_s: float = 1e-3
    host_s: float = 1e-3
    max_num_batched_tokens: int = 8192


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer with 16-bit weights and KV cache, as far as its cost is concerned.

    Attributes:
        num_params: all of them; they take memory.
        num_layer_params: those that every token is multiplied with.
        num_head_params: those that only a token that samples is multiplied with: vocabulary × hidden size.
    """

    num_params: float
    num_layer_params: float
    num_head_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int

    @property
    def weight_bytes(self) -> float:
        return 2 * self.num_params

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def read_bytes(self) -> float:
        """Weights that a step reads; looking up an embedding reads next to nothing."""
        return 2 * (self.num_layer_params + self.num_head_params)

    @property
    def attention_flops_per_pair(self) -> int:
        """Of one token with one token of its context: multiply and add, for the score and for the value."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


DEVICES = {
    # 2 cores of a Zen 4 EPYC as measured with our bf16 kernels: 32 GB/s, 390 to 430 GFLOP/s;
    # copies run at half the bandwidth.
    "cpu": Device(
        memory_bytes=8 * GIB,
        memory_bytes_per_s=32e9,
        flops_per_s=400e9,
        link_bytes_per_s=16e9,
        compute_share=1.0,
        memory_share=1.0,
        link_share=1.0,
        step_overhead_s=0.2e-3,
        host_s=0.5e-3,
        max_num_batched_tokens=512,
    ),
    # NVIDIA A100 data sheet, SXM, 40 GB: 312 TFLOP/s bf16, 1,555 GB/s; PCIe 4 x16: 32 GB/s a direction.
    "a100-40g": Device(40 * GIB, 1.555e12, 312e12, 32e9),
    # The same, 80 GB: 2,039 GB/s.
    "a100-80g": Device(80 * GIB, 2.039e12, 312e12, 32e9),
    # NVIDIA H100 data sheet, SXM: 989 TFLOP/s bf16, 3.35 TB/s, 80 GB; PCIe 5 x16: 64 GB/s a direction.
    "h100": Device(80 * GIB, 3.35e12, 989e12, 64e9),
    # NVIDIA H200 data sheet, SXM: the H100's arithmetic, 4.8 TB/s, 141 GB (decimal, unlike the others).
    "h200": Device(141 * 10**9, 4.8e12, 989e12, 64e9),
}

MODELS = {
    # From each model's config.json. The head of SmolLM2 and OPT is the embedding, the others have both.
    "smollm2-135m": Model(134.5e6, 106.2e6, 28.3e6, 30, 9, 3, 64, 8192),
    "llama-8b": Model(8.03e9, 6.98e9, 0.525e9, 32, 32, 8, 128, 131_072),  # Llama 3.1
    "llama-70b": Model(70.6e9, 68.5e9, 1.05e9, 80, 64, 8, 128, 131_072),  # Llama 3.1
    "opt-13b": Model(12.85e9, 12.58e9, 0.257e9, 40, 40, 40, 128, 2048),  # the model of the PagedAttention paper
}
