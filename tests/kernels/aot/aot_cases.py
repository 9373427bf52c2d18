"""The table of what is compiled: ops, called as the worker calls them, with the shapes of real models.

A case says what a wrapper is given; which kernels that launches, with which tiles, is the wrapper's own choice. Two
cases that lead to the same compiled kernel cost nothing twice. Cases marked slow are left out of `make test`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

import octavo.kernels.triton.backends  # registers what `select` chooses from
from octavo.kernels import registry
from octavo.kernels.ops import activation, attention, linear, moe, norm, philox, rotary, sampling

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """Calls of ops that lead to launches; `run` is called once per target, where tensors are fake."""

    name: str
    run: Callable[[], None]
    is_slow: bool = False


class Shape(NamedTuple):
    """A model's sizes, as far as kernels see them."""

    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


LLAMA_8B = Shape(4096, 14336, 32, 8, 128, 128256)
SMOLLM2 = Shape(576, 1536, 9, 3, 64, 49152)


def heads(query_heads: int, kv_heads: int, head_dim: int) -> Shape:
    return LLAMA_8B._replace(num_query_heads=query_heads, num_kv_heads=kv_heads, head_dim=head_dim)


def attend(
    shape: Shape,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    block_size: int = 16,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: str = "triton",
) -> None:
    """One step's attention of one layer."""
    num_tokens, max_blocks = sum(query_lens), -(-max(seq_lens) // block_size)
    fused = torch.empty(num_tokens, (shape.num_query_heads + 2 * shape.num_kv_heads) * shape.head_dim, dtype=dtype)
    query = fused[:, : shape.num_query_heads * shape.head_dim].view(num_tokens, -1, shape.head_dim)
    cache = torch.empty(
        4, 2, len(seq_lens) * max_blocks, block_size, shape.num_kv_heads, shape.head_dim, dtype=kv_dtype or dtype
    )
    plan = attention.plan_attention.implementations[backend](
        np.array(query_lens, np.int32),
        np.array(seq_lens, np.int32),
        attention.HeadShape(shape.num_query_heads, shape.num_kv_heads, shape.head_dim),
        window=window,
    )
    attention.paged_attention.implementations[backend](
        query,
        cache[1],
        torch.empty(len(query_lens) + 1, dtype=torch.int32),
        torch.empty(len(query_lens), dtype=torch.int32),
        torch.empty(len(query_lens), max_blocks, dtype=torch.int32),
        shape.head_dim**-0.5,
        window=window,
        soft_cap=soft_cap,
        kv_scales=torch.empty(2) if kv_dtype is FP8 else None,
        plan=plan,
    )


def decode(shape: Shape, **options: object) -> Callable[[], None]:
    return lambda: attend(shape, [1] * 64, [2048] * 64, **options)


def prefill(shape: Shape, **options: object) -> Callable[[], None]:
    return lambda: attend(shape, [2048, 512], [2048, 4096], **options)


def mixed(shape: Shape, **options: object) -> Callable[[], None]:
    return lambda: attend(shape, [1] * 32 + [480], [2048] * 32 + [4000], **options)


def write_kv(shape: Shape, dtype: torch.dtype = BF16, kv_dtype: torch.dtype | None = None) -> None:
    fused = torch.empty(256, (shape.num_query_heads + 2 * shape.num_kv_heads) * shape.head_dim, dtype=dtype)
    _, key, value = fused.split([n * shape.head_dim for n in (shape.num_query_heads, *[shape.num_kv_heads] * 2)], 1)
    cache = torch.empty(4, 2, 64, 16, shape.num_kv_heads, shape.head_dim, dtype=kv_dtype or dtype)
    key, value = (part.view(256, -1, shape.head_dim) for part in (key, value))
    slots = torch.empty(256, dtype=torch.int64)
    attention.write_kv(key, value, cache[1], slots, kv_scales=torch.empty(2) if kv_dtype is FP8 else None)


def copy_blocks() -> None:
    cache = torch.empty(32, 2, 64, 16, 8, 128, dtype=BF16)
    attention.copy_blocks(cache, cache, [(1, 5), (2, 6), (3, 7)])


def rms_norm(hidden_size: int, has_residual: bool, dtype: torch.dtype = BF16) -> None:
    x = torch.empty(256, hidden_size, dtype=dtype)
    norm.rms_norm(x, torch.empty(hidden_size, dtype=dtype), 1e-5, torch.empty_like(x) if has_residual else None)


def rotate(shape: Shape, dtype: torch.dtype = BF16, rotary_dim: int | None = None) -> None:
    fused = torch.empty(256, (shape.num_query_heads + 2 * shape.num_kv_heads) * shape.head_dim, dtype=dtype)
    query, key, _ = fused.split([n * shape.head_dim for n in (shape.num_query_heads, *[shape.num_kv_heads] * 2)], 1)
    query, key = (part.view(256, -1, shape.head_dim) for part in (query, key))
    rotary.rotary(query, key, torch.empty(256, dtype=torch.int64), torch.empty(8192, rotary_dim or shape.head_dim))


def gated(name: str, intermediate_size: int, dtype: torch.dtype = BF16) -> None:
    getattr(activation, name)(torch.empty(256, 2 * intermediate_size, dtype=dtype))


def sample(vocab_size: int, num_rows: int = 64) -> None:
    options = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.float64)
    logits, temperatures, min_ps = torch.empty(num_rows, vocab_size), torch.empty(num_rows), torch.empty(num_rows)
    uniforms = torch.empty(num_rows, dtype=torch.float64)
    sampling.sample_tokens(logits, temperatures, *options, min_ps, uniforms)


def sample_plainly(vocab_size: int, num_rows: int = 64) -> None:
    uniforms = torch.empty(num_rows, dtype=torch.float64)
    sampling.sample_tokens(torch.empty(num_rows, vocab_size), torch.empty(num_rows), None, None, None, uniforms)


def random_numbers() -> None:
    philox.philox_uniform(*(torch.empty(64, dtype=torch.int64) for _ in range(4)))


def experts(num_experts: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype = BF16) -> None:
    rows, start_loc = torch.empty(128, hidden_size, dtype=dtype), torch.empty(num_experts + 1, dtype=torch.int32)
    moe.grouped_linear(rows, torch.empty(num_experts, 2 * intermediate_size, hidden_size, dtype=dtype), start_loc)


def deterministic_linear(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype = BF16) -> None:
    x, weight = torch.empty(num_rows, num_inputs, dtype=dtype), torch.empty(num_outputs, num_inputs, dtype=dtype)
    linear.linear.implementations["deterministic"](x, weight, torch.empty(num_outputs, dtype=dtype))
    linear.linear.implementations["deterministic"](x, weight)


def deterministic_head(shape: Shape, dtype: torch.dtype = BF16) -> None:
    hidden = torch.empty(64, shape.hidden_size, dtype=dtype)
    weight = torch.empty(shape.vocab_size, shape.hidden_size, dtype=dtype)
    linear.head_logits.implementations["deterministic"](hidden, weight, torch.empty(1, shape.hidden_size))


ATTENTION = [
    Case("attention decode, Llama 8B", decode(LLAMA_8B)),
    Case("attention prefill, Llama 8B", prefill(LLAMA_8B)),
    Case("attention decode, SmolLM2", decode(SMOLLM2)),
    Case("attention prefill, SmolLM2", prefill(SMOLLM2)),
    Case("attention mixed, Llama 8B", mixed(LLAMA_8B), is_slow=True),
    Case("attention mixed, blocks of 64", mixed(LLAMA_8B, block_size=64)),
    Case("attention mixed, blocks of 32", mixed(LLAMA_8B, block_size=32), is_slow=True),
    Case("attention mixed, head size 80", mixed(heads(32, 32, 80))),
    Case("attention mixed, head size 96", mixed(heads(32, 32, 96)), is_slow=True),
    Case("attention mixed, head size 256", mixed(heads(16, 8, 256))),
    Case("attention mixed, group of 8", mixed(heads(64, 8, 128)), is_slow=True),
    Case("attention mixed, fp16", mixed(LLAMA_8B, dtype=FP16), is_slow=True),
    Case("attention mixed, fp32", mixed(SMOLLM2, dtype=FP32), is_slow=True),
    Case("attention mixed, window", mixed(LLAMA_8B, window=4096)),
    Case("attention mixed, soft cap", mixed(heads(16, 8, 256), soft_cap=50.0), is_slow=True),
    Case("attention mixed, window and soft cap", mixed(LLAMA_8B, window=4096, soft_cap=30.0), is_slow=True),
    Case("attention mixed, fp8 cache", mixed(LLAMA_8B, kv_dtype=FP8)),
    Case("attention mixed, fp8 cache, head size 64", mixed(SMOLLM2, kv_dtype=FP8), is_slow=True),
    Case("deterministic attention, Llama 8B", mixed(LLAMA_8B, backend="deterministic")),
    Case("deterministic attention, SmolLM2", mixed(SMOLLM2, backend="deterministic")),
    Case("deterministic attention, head size 256", mixed(heads(16, 8, 256), backend="deterministic"), is_slow=True),
    Case("deterministic attention, fp8 cache", mixed(LLAMA_8B, kv_dtype=FP8, backend="deterministic"), is_slow=True),
    Case("deterministic attention, fp32", mixed(SMOLLM2, dtype=FP32, backend="deterministic"), is_slow=True),
    Case("write KV, Llama 8B", lambda: write_kv(LLAMA_8B)),
    Case("write KV, SmolLM2", lambda: write_kv(SMOLLM2), is_slow=True),
    Case("write KV, fp8 cache", lambda: write_kv(LLAMA_8B, kv_dtype=FP8)),
    Case("write KV, head size 80", lambda: write_kv(heads(32, 32, 80)), is_slow=True),
    Case("copy blocks", copy_blocks),
]
DENSE = [
    Case("norm, 4096", lambda: rms_norm(4096, has_residual=False)),
    Case("norm with residual, 4096", lambda: rms_norm(4096, has_residual=True)),
    Case("norm with residual, 576", lambda: rms_norm(576, has_residual=True)),
    Case("norm with residual, 8192", lambda: rms_norm(8192, has_residual=True), is_slow=True),
    Case("norm with residual, 4096, fp16", lambda: rms_norm(4096, True, FP16), is_slow=True),
    Case("norm with residual, 4096, fp32", lambda: rms_norm(4096, True, FP32), is_slow=True),
    Case("rotary, Llama 8B", lambda: rotate(LLAMA_8B)),
    Case("rotary, SmolLM2", lambda: rotate(SMOLLM2)),
    Case("rotary, part of the head", lambda: rotate(heads(32, 32, 80), rotary_dim=32), is_slow=True),
    Case("rotary, fp32", lambda: rotate(SMOLLM2, FP32), is_slow=True),
    Case("SiLU and product", lambda: gated("silu_mul", 14336)),
    Case("GELU and product", lambda: gated("gelu_mul", 14336)),
    Case("sampling, 128k", lambda: sample(128256)),
    Case("sampling without filters, 128k", lambda: sample_plainly(128256)),
    Case("sampling, 49k", lambda: sample(49152), is_slow=True),
    Case("random numbers", random_numbers),
    Case("experts, Mixtral", lambda: experts(8, 4096, 14336)),
    Case("experts, 128 of them", lambda: experts(128, 2048, 768), is_slow=True),
    Case("experts, fp32", lambda: experts(8, 512, 1024, FP32), is_slow=True),
    Case("deterministic linear, Llama 8B", lambda: deterministic_linear(64, 4096, 6144)),
    Case("deterministic linear, SmolLM2", lambda: deterministic_linear(64, 576, 960)),
    Case("deterministic linear, fp16", lambda: deterministic_linear(64, 4096, 6144, FP16), is_slow=True),
    Case("deterministic linear, fp32", lambda: deterministic_linear(64, 576, 960, FP32), is_slow=True),
    Case("deterministic head, Llama 8B", lambda: deterministic_head(LLAMA_8B)),
]
CASES = [*ATTENTION, *DENSE]

registry.select("triton")
__all__ = ["CASES", "Case", "octavo"]
