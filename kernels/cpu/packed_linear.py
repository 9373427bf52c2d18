"""Packed weights on the CPU.

bfloat16 and fp32 weights are dense, blocks of GGUF files are grouped; each kind has kernels of its own, and beside them
all is alike. Blocks are never rounded anew: they move into panels as they are, which take the size of the blocks.
Activations beside them are rounded in every call (see csrc/grouped_rows.h); with AMX bfloat16 ones are not, and blocks
are widened in front of the tile unit (see csrc/grouped_widened.h).
"""

from __future__ import annotations

import torch

from octavo.kernels.cpu.arguments import address, element_kind
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.cpu.kept_memory import LOGITS
from octavo.kernels.cpu.linear_arguments import (
    EmbeddingArgs,
    GroupedLinearArgs,
    LinearArgs,
    PackArgs,
    held_weight,
    linear_output,
)
from octavo.kernels.ops.packed_linear import (
    ROW_DTYPES,
    WEIGHTS_PER_BLOCK,
    Activation,
    PackedWeight,
    WeightFormat,
    pack_rows,
    packed_embedding,
    packed_gated_linear,
    packed_linear,
    packed_logits,
    packed_num_bytes,
    row_num_bytes,
)
from octavo.kernels.registry import backend

_PANEL_COLUMNS = 32
_INPUTS_PER_TILE = 32  # to which bfloat16 weights are filled up
_BLOCK_ROWS = 16
_ROW_GROUP_BYTES = _BLOCK_ROWS * (WEIGHTS_PER_BLOCK + 3 * 4)
"""A group of inputs of 16 rows, rounded (`RowGroup`)."""


def _kernel(weight_format: WeightFormat, name: str) -> str:
    return f"{'dense' if weight_format in ROW_DTYPES else 'grouped'}_{name}"


@backend("cpu", implements=packed_num_bytes)
def cpu_packed_num_bytes(weight_format: WeightFormat, num_outputs: int, num_inputs: int, is_gated: bool = False) -> int:
    """Return the size of whole panels.

    Raises ValueError for inputs that are not whole blocks, or a gated weight with an odd number of outputs.
    """
    if is_gated and num_outputs % 2:
        raise ValueError(f"a gated weight has {num_outputs} outputs, which are not two halves")
    num_columns = num_outputs // 2 if is_gated else num_outputs
    num_panels = -(-num_columns // (_PANEL_COLUMNS // 2 if is_gated else _PANEL_COLUMNS))
    if weight_format is WeightFormat.BFLOAT16:
        num_inputs = -(-num_inputs // _INPUTS_PER_TILE) * _INPUTS_PER_TILE
    return num_panels * _PANEL_COLUMNS * row_num_bytes(weight_format, num_inputs)


@backend("cpu", implements=pack_rows)
def cpu_pack_rows(weight: PackedWeight, first_row: int, rows: torch.Tensor) -> None:
    """Put rows into their panels; raises ValueError for another dtype or shape, IndexError for rows outside."""
    dtype, width = ROW_DTYPES.get(weight.format), weight.num_inputs
    if dtype is None:
        dtype, width = torch.uint8, row_num_bytes(weight.format, weight.num_inputs)
    if rows.dtype is not dtype or rows.shape[1:] != (width,):
        raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}, not {dtype} [n, {width}]")
    if first_row < 0 or first_row + len(rows) > weight.num_outputs:
        raise IndexError(f"rows {first_row} to {first_row + len(rows)} of a weight with {weight.num_outputs}")
    rows = rows.contiguous()
    EXECUTOR.run(_kernel(weight.format, "pack"), PackArgs(held_weight(weight), address(rows), first_row), len(rows))


def _multiply(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    activation: Activation | None,
    result: torch.Tensor,
) -> torch.Tensor:
    """Fill `result`; raises ValueError for an x of another width, or that is not bfloat16 beside such a weight."""
    if x.shape[1:] != (weight.num_inputs,):
        raise ValueError(f"x is {list(x.shape)}, not [n, {weight.num_inputs}]")
    if weight.format is WeightFormat.BFLOAT16 and x.dtype is not torch.bfloat16:
        raise ValueError(f"x is {x.dtype} with a bfloat16 weight")
    output = linear_output(result, weight, bias, activation)
    of_x, held = (address(x), element_kind(x.dtype)), held_weight(weight)
    if weight.format in ROW_DTYPES:
        EXECUTOR.run("dense_linear", LinearArgs(*of_x, held, output), len(x))
    elif x.dtype is torch.bfloat16 and EXECUTOR.library.has_kernel("widened_linear"):
        EXECUTOR.run("widened_linear", LinearArgs(*of_x, held, output), len(x))
    else:
        num_groups = weight.num_inputs // WEIGHTS_PER_BLOCK
        rounded = EXECUTOR.empty((-(-len(x) // _BLOCK_ROWS), num_groups, _ROW_GROUP_BYTES), torch.uint8)
        EXECUTOR.run("grouped_linear", GroupedLinearArgs(*of_x, held, address(rounded), output), len(x))
    return result


@backend("cpu", implements=packed_linear)
def cpu_packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _multiply(x, weight, bias, None, EXECUTOR.empty((x.shape[0], weight.num_outputs), x.dtype))


@backend("cpu", implements=packed_gated_linear)
def cpu_packed_gated_linear(
    x: torch.Tensor, weight: PackedWeight, activation: Activation, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The products stay in fp32 until the end."""
    result = EXECUTOR.empty((x.shape[0], weight.num_outputs // 2), x.dtype)
    return _multiply(x, weight, bias, activation, result)


@backend("cpu", implements=packed_logits)
def cpu_packed_logits(hidden: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    return _multiply(hidden, weight, None, None, LOGITS.empty((hidden.shape[0], weight.num_outputs)))


@backend("cpu", implements=packed_embedding)
def cpu_packed_embedding(token_ids: torch.Tensor, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    if token_ids.dtype is not torch.int64:
        raise ValueError(f"token ids are {token_ids.dtype}, not int64")
    result = EXECUTOR.empty((len(token_ids), weight.num_inputs), dtype)
    args = EmbeddingArgs(held_weight(weight), address(token_ids), address(result), element_kind(dtype))
    EXECUTOR.run(_kernel(weight.format, "embedding"), args, len(token_ids))
    return result
