"""The products of all experts in one launch; which rows are whose is known on the device only.

The grid covers the most tiles that there can be: an expert adds at most one tile that is not full. Each program finds
its expert in the running number of tiles, a few hundred integers at most; programs past the last tile end at once. So
nothing waits for the host, and one captured graph serves any routing. Tiles are those of the deterministic product, so
that a row's bits depend on that row alone, whoever else chose its expert. Rejected: padding every expert's rows to
whole tiles in memory (a second copy of x); one launch per expert (a hundred launches, and a wait for their sizes).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.ops.moe import grouped_linear
from octavo.kernels.registry import backend
from octavo.kernels.triton.linear import TILES_16_BIT, TILES_32_BIT, Tiles, multiply_tile
from octavo.kernels.triton.rows import with_adjacent_elements


def tiles_for(dtype: torch.dtype) -> Tiles:
    """Fewer rows than in a dense product: most experts have few."""
    return TILES_32_BIT if dtype.itemsize == 4 else TILES_16_BIT._replace(block_rows=64)


@triton.jit(do_not_specialize=["num_row_tiles"])
def grouped_linear_kernel(
    x_ptr,  # [num_rows, num_terms], stride given
    weight_ptr,  # [num_experts, num_columns, num_terms], strides given
    result_ptr,  # [num_rows, num_columns], contiguous
    expert_start_loc_ptr,  # int32 [num_experts + 1]
    num_row_tiles,
    num_columns,
    num_terms,
    x_row_stride,
    weight_expert_stride,
    weight_row_stride,
    num_experts: tl.constexpr,
    block_experts: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_terms: tl.constexpr,
):
    tile = tl.program_id(0) % num_row_tiles
    experts = tl.arange(0, block_experts)
    is_expert = experts < num_experts
    starts = tl.load(expert_start_loc_ptr + experts, mask=is_expert, other=0)
    ends = tl.load(expert_start_loc_ptr + experts + 1, mask=is_expert, other=0)
    last_tiles = tl.cumsum(tl.cdiv(ends - starts, block_rows), 0)
    expert = tl.sum((last_tiles <= tile).to(tl.int32), 0)
    if expert < num_experts:
        first_tile = tl.max(tl.where(experts < expert, last_tiles, 0), 0)
        start = tl.load(expert_start_loc_ptr + expert)
        rows = start + (tile - first_tile) * block_rows + tl.arange(0, block_rows)
        has_row = rows < tl.load(expert_start_loc_ptr + expert + 1)
        columns = tl.program_id(0) // num_row_tiles * block_columns + tl.arange(0, block_columns)
        has_column = columns < num_columns
        total = multiply_tile(
            x_ptr,
            weight_ptr + expert.to(tl.int64) * weight_expert_stride,
            rows,
            has_row,
            columns,
            has_column,
            num_terms,
            x_row_stride,
            weight_row_stride,
            block_terms,
        )
        places = (rows.to(tl.int64) * num_columns)[:, None] + columns[None, :]
        is_inside = has_row[:, None] & has_column[None, :]
        tl.store(result_ptr + places, total.to(result_ptr.dtype.element_ty), mask=is_inside)


@backend("triton", implements=grouped_linear)
def triton_grouped_linear(x: torch.Tensor, weight: torch.Tensor, expert_start_loc: torch.Tensor) -> torch.Tensor:
    x, weight = with_adjacent_elements(x), with_adjacent_elements(weight)
    num_rows, num_terms = x.shape
    num_experts, num_columns, _ = weight.shape
    result = x.new_empty(num_rows, num_columns)
    tiles = tiles_for(x.dtype)
    num_row_tiles = min(num_rows, num_rows // tiles.block_rows + num_experts)
    num_programs = num_row_tiles * triton.cdiv(num_columns, tiles.block_columns)
    grouped_linear_kernel[(num_programs,)](
        x,
        weight,
        result,
        expert_start_loc,
        num_row_tiles,
        num_columns,
        num_terms,
        x.stride(0),
        *weight.stride()[:2],
        num_experts=num_experts,
        block_experts=triton.next_power_of_2(num_experts),
        **tiles._asdict(),
    )
    return result
