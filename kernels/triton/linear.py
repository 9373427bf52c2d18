"""Matrix products of the layers on a GPU: the vendor's library, or with "deterministic" one kernel of fixed shape.

The library (cuBLAS, hipBLASLt) chooses tiles and splits of the sum by the number of rows, so that a row's bits depend
on its company. The kernel here has one tile per dtype whatever the number of rows, takes the terms of the sum in one
order from first to last, adds up in fp32, and rounds once: a row's bits depend on that row alone.

What it costs: a step with few rows computes as if it had `block_rows`; such a step waits for the weights to arrive from
memory anyway, so that what is lost is the overlap that a split sum would give where there are fewer tiles than
multiprocessors. For a long prompt its tile uses what it loads half as often as a tile of 128 by 256 would (43 products
per element loaded, not 85), which a step with few rows could not afford. In fp32 products are exact to fp32 ("ieee",
without tensor cores), which a model in fp32 is there for. Rejected: autotuning, and one tile for few rows and another
for many (either changes the order of a sum with the shape, or with the clock); splitting the sum (another launch, or
atomic additions in any order).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from octavo.kernels.ops.linear import head_logits, linear
from octavo.kernels.registry import backend
from octavo.kernels.triton.rows import with_adjacent_elements


class Tiles(NamedTuple):
    """What one program computes at a time, and how many of the terms' tiles are on their way."""

    block_rows: int
    block_columns: int
    block_terms: int
    num_warps: int
    num_stages: int


TILES_16_BIT = Tiles(block_rows=128, block_columns=64, block_terms=64, num_warps=4, num_stages=3)
TILES_32_BIT = Tiles(block_rows=32, block_columns=32, block_terms=32, num_warps=4, num_stages=2)


def tiles_for(dtype: torch.dtype) -> Tiles:
    return TILES_32_BIT if dtype.itemsize == 4 else TILES_16_BIT


@triton.jit
def multiply_tile(
    x_ptr,  # rows of `num_terms` adjacent elements
    weight_ptr,  # the same
    rows,
    has_row,
    columns,
    has_column,
    num_terms,
    x_row_stride,
    weight_row_stride,
    block_terms: tl.constexpr,
):
    """Return fp32 [rows, columns]: rows of x times rows of the weight, terms in order; nothing else is read."""
    terms = tl.arange(0, block_terms)
    x_ptrs = x_ptr + (rows.to(tl.int64) * x_row_stride)[:, None] + terms[None, :]
    weight_ptrs = weight_ptr + (columns.to(tl.int64) * weight_row_stride)[None, :] + terms[:, None]
    total = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for first in tl.range(0, num_terms, block_terms):
        has_term = terms < num_terms - first
        x = tl.load(x_ptrs, mask=has_row[:, None] & has_term[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=has_term[:, None] & has_column[None, :], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
        x_ptrs += block_terms
        weight_ptrs += block_terms
    return total


@triton.jit(do_not_specialize=["num_rows"])
def fixed_linear_kernel(
    x_ptr,  # [num_rows, num_terms], stride given
    weight_ptr,  # [num_columns, num_terms], stride given
    bias_ptr,  # [num_columns], or None
    result_ptr,  # [num_rows, num_columns], contiguous
    num_rows,
    num_columns,
    num_terms,
    x_row_stride,
    weight_row_stride,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_terms: tl.constexpr,
):
    # Programs side by side share a tile of the weight, the larger operand.
    num_row_tiles = tl.cdiv(num_rows, block_rows)
    rows = tl.program_id(0) % num_row_tiles * block_rows + tl.arange(0, block_rows)
    columns = tl.program_id(0) // num_row_tiles * block_columns + tl.arange(0, block_columns)
    has_row = rows < num_rows
    has_column = columns < num_columns
    total = multiply_tile(
        x_ptr,
        weight_ptr,
        rows,
        has_row,
        columns,
        has_column,
        num_terms,
        x_row_stride,
        weight_row_stride,
        block_terms,
    )
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    places = (rows.to(tl.int64) * num_columns)[:, None] + columns[None, :]
    tl.store(result_ptr + places, total.to(result_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


def fixed_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return x Wᵀ + b in `dtype`, each row's bits a function of that row of x."""
    x, weight = with_adjacent_elements(x), with_adjacent_elements(weight)
    (num_rows, num_terms), num_columns = x.shape, weight.shape[0]
    result = x.new_empty(num_rows, num_columns, dtype=dtype)
    tiles = tiles_for(x.dtype)
    num_programs = triton.cdiv(num_rows, tiles.block_rows) * triton.cdiv(num_columns, tiles.block_columns)
    fixed_linear_kernel[(num_programs,)](
        x, weight, bias, result, num_rows, num_columns, num_terms, x.stride(0), weight.stride(0), **tiles._asdict()
    )
    return result


@backend("triton", implements=linear)
def library_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functional.linear(x, weight, bias)


@backend("triton", implements=head_logits)
def library_head_logits(hidden: torch.Tensor, weight: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """The operands are taken as they are, and only the result is fp32; `tile` is not needed."""
    if hidden.dtype is torch.float32:
        return torch.mm(hidden, weight.t())
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)


@backend("deterministic", implements=linear)
def fixed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return fixed_product(x, weight, bias, x.dtype)


@backend("deterministic", implements=head_logits)
def fixed_head_logits(hidden: torch.Tensor, weight: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
    """The operands are taken as they are, and only the result is fp32; `tile` is not needed."""
    return fixed_product(hidden, weight, None, torch.float32)
