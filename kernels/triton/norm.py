"""Root mean square normalisation on a GPU: one pass over the memory, a program takes some whole rows.

A row stays in registers between its sum and its scaling. Tile and warps follow from the row's length only, so that a
row is summed in one order whatever the number of rows. Rounds where the reference does: the sum with the residual, the
scaled row, the result. Rejected: writing the sum over the residual, which saves no traffic and changes an argument.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.ops.norm import rms_norm
from octavo.kernels.registry import backend
from octavo.kernels.triton.rows import as_groups_of_rows

TILE_ELEMENTS = 1024  # short rows share a program
ELEMENTS_PER_WARP = 512
MAX_NUM_WARPS = 16


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,  # [groups, rows_per_group, row_size], strides given
    residual_ptr,  # the same, or None
    weight_ptr,  # [row_size]
    normed_ptr,  # [num_rows, row_size], contiguous
    total_ptr,  # the same, or None
    num_rows,
    rows_per_group,
    row_size,
    eps,
    x_group_stride,
    x_row_stride,
    residual_group_stride,
    residual_row_stride,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    columns = tl.arange(0, tile_columns)
    is_inside = (rows < num_rows)[:, None] & (columns < row_size)[None, :]
    group = rows // rows_per_group
    row = rows % rows_per_group

    x_places = (group * x_group_stride + row * x_row_stride)[:, None] + columns[None, :]
    result_places = rows[:, None] * row_size + columns[None, :]
    x = tl.load(x_ptr + x_places, mask=is_inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_places = (group * residual_group_stride + row * residual_row_stride)[:, None] + columns[None, :]
        x += tl.load(residual_ptr + residual_places, mask=is_inside, other=0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + result_places, total, mask=is_inside)
        x = total.to(tl.float32)

    inverse = tl.rsqrt(tl.sum(x * x, 1) / row_size + eps)
    scaled = (x * inverse[:, None]).to(normed_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < row_size, other=0.0).to(tl.float32)
    tl.store(normed_ptr + result_places, (scaled * weight[None, :]).to(normed_ptr.dtype.element_ty), mask=is_inside)


@backend("triton", implements=rms_norm)
def triton_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    groups = as_groups_of_rows(x)
    residual_groups = None if residual is None else as_groups_of_rows(residual)
    residual_strides = (0, 0) if residual_groups is None else residual_groups.stride()[:2]
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = None if residual is None else torch.empty_like(normed)
    row_size, num_rows = x.shape[-1], groups.shape[0] * groups.shape[1]
    tile_columns = triton.next_power_of_2(row_size)
    tile_rows = max(1, TILE_ELEMENTS // tile_columns)
    rms_norm_kernel[(triton.cdiv(num_rows, tile_rows),)](
        groups,
        residual_groups,
        weight,
        normed,
        total,
        num_rows,
        groups.shape[1],
        row_size,
        eps,
        *groups.stride()[:2],
        *residual_strides,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        num_warps=min(MAX_NUM_WARPS, max(1, tile_rows * tile_columns // ELEMENTS_PER_WARP)),
    )
    return normed if total is None else (normed, total)
