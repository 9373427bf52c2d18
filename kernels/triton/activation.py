"""The products of gated feed-forward layers on a GPU: elementwise, one pass over the memory.

Both activations are gate · sigmoid(z): with z = gate for SiLU; for GELU in its tanh approximation with
z = 2 √(2/π) (gate + 0.044715 gate³), because (1 + tanh(u)) / 2 = sigmoid(2u). That form loses nothing where tanh nears
-1, and needs one exponential. Rounds where the reference does: the activation, then the product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.ops.activation import gelu_mul, silu_mul
from octavo.kernels.registry import backend
from octavo.kernels.triton.rows import with_adjacent_elements

TILE_COLUMNS = 1024
LOG2_E = tl.constexpr(1.4426950408889634)
GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 √(2/π)
GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def gated_product_kernel(
    gate_up_ptr,  # [num_rows, 2 * num_columns], stride given
    result_ptr,  # [num_rows, num_columns], contiguous
    num_columns,
    row_stride,
    is_gelu: tl.constexpr,
    tile_columns: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    is_inside = columns < num_columns
    gate_ptr = gate_up_ptr + row * row_stride
    gate = tl.load(gate_ptr + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + num_columns + columns, mask=is_inside, other=0.0).to(tl.float32)
    z = gate
    if is_gelu:
        z = (gate + gate * gate * gate * GELU_CUBIC) * GELU_SCALE
    activated = gate / (1.0 + tl.exp2(z * -LOG2_E))
    dtype = result_ptr.dtype.element_ty
    product = activated.to(dtype).to(tl.float32) * up
    tl.store(result_ptr + row * num_columns + columns, product.to(dtype), mask=is_inside)


def gated_product(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    num_columns = gate_up.shape[-1] // 2
    rows = with_adjacent_elements(gate_up).reshape(-1, 2 * num_columns)
    result = gate_up.new_empty(*gate_up.shape[:-1], num_columns)
    gated_product_kernel[(rows.shape[0], triton.cdiv(num_columns, TILE_COLUMNS))](
        rows, result, num_columns, rows.stride(0), is_gelu=is_gelu, tile_columns=TILE_COLUMNS, num_warps=4
    )
    return result


@backend("triton", implements=silu_mul)
def triton_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return gated_product(gate_up, is_gelu=False)


@backend("triton", implements=gelu_mul)
def triton_gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return gated_product(gate_up, is_gelu=True)
