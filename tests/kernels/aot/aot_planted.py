"""Kernels with known defects: a table like `aot_cases`, with which the check itself is checked."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from aot_cases import Case


@triton.jit
def product_kernel(
    a, b, c, num_terms, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, precision: tl.constexpr
):
    m, n, k = tl.arange(0, tile_m), tl.arange(0, tile_n), tl.arange(0, tile_k)
    total = tl.zeros((tile_m, tile_n), tl.float32)
    for first in range(0, num_terms, tile_k):
        left = tl.load(a + m[:, None] * num_terms + first + k[None, :])
        right = tl.load(b + (first + k)[:, None] * tile_n + n[None, :])
        total = tl.dot(left, right, total, input_precision=precision)
    tl.store(c + m[:, None] * tile_n + n[None, :], total)


@triton.jit
def mismatched_kernel(x, size: tl.constexpr):
    tl.store(x + tl.arange(0, size), tl.arange(0, 2 * size))


def product(
    tile: int, num_stages: int, dtype: torch.dtype = torch.bfloat16, precision: str = "tf32", num_warps: int = 4
) -> None:
    a, b = torch.empty(tile, 1024, dtype=dtype), torch.empty(1024, tile, dtype=dtype)
    product_kernel[(1,)](
        a, b, torch.empty(tile, tile), 1024, tile, tile, 64, precision, num_stages=num_stages, num_warps=num_warps
    )


def mismatched() -> None:
    mismatched_kernel[(1,)](torch.empty(16), 16)


CASES = [
    Case("sound", lambda: product(64, 3)),
    Case("sound again", lambda: product(64, 3)),
    Case("exact fp32", lambda: product(32, 1, torch.float32, "ieee")),
    Case("spills", lambda: product(128, 1, num_warps=1)),
    Case("too much shared memory", lambda: product(128, 9)),
    Case("does not compile", mismatched),
    Case("launches nothing", lambda: None),
]
