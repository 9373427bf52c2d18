"""Products with weights in blocks of GGUF files on the CPU; their layout is in csrc/grouped_layout.h.

Blocks are never widened and never rounded anew: they move into panels as they are, which take the size of the blocks.
Activations are rounded to 8 bits in every call, each group of 32 inputs of a row with a scale of its own.
"""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.arguments import address, element_kind
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.cpu.kept_memory import LOGITS
from octavo.kernels.cpu.linear_arguments import LinearOutput, linear_output
from octavo.kernels.ops.packed_linear import (
    WEIGHTS_PER_BLOCK,
    Activation,
    PackedWeight,
    WeightFormat,
    row_num_bytes,
)

_PANEL_COLUMNS = 32
_BLOCK_ROWS = 16
_ROW_GROUP_BYTES = _BLOCK_ROWS * (2 * WEIGHTS_PER_BLOCK + 3 * 4)
"""A group of inputs of 16 rows, rounded, in its larger form (`FineGroup`; `RowGroup` is smaller)."""
_FORMAT_KINDS = {WeightFormat.Q8_0: 0, WeightFormat.Q4_0: 1, WeightFormat.Q4_1: 2}


class _GroupedWeight(ctypes.Structure):
    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("is_gated", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


class _GroupedLinearArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_is_bf16", ctypes.c_int64),
        ("weight", _GroupedWeight),
        ("rounded", ctypes.c_void_p),
        ("output", LinearOutput),
    )


class _GroupedPackArgs(ctypes.Structure):
    _fields_ = (("weight", _GroupedWeight), ("rows", ctypes.c_void_p), ("first_row", ctypes.c_int64))


class _GroupedEmbeddingArgs(ctypes.Structure):
    _fields_ = (
        ("weight", _GroupedWeight),
        ("token_ids", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("is_bf16", ctypes.c_int64),
    )


def num_bytes(weight_format: WeightFormat, num_outputs: int, num_inputs: int, is_gated: bool) -> int:
    """Return the size of whole panels.

    Raises ValueError for inputs that are not whole blocks, or a gated weight with an odd number of outputs.
    """
    if is_gated and num_outputs % 2:
        raise ValueError(f"a gated weight has {num_outputs} outputs, which are not two halves")
    num_columns = num_outputs // 2 if is_gated else num_outputs
    num_panels = -(-num_columns // (_PANEL_COLUMNS // 2 if is_gated else _PANEL_COLUMNS))
    return num_panels * _PANEL_COLUMNS * row_num_bytes(weight_format, num_inputs)


def _grouped_weight(weight: PackedWeight) -> _GroupedWeight:
    return _GroupedWeight(
        address(weight.data), weight.num_outputs, weight.num_inputs, weight.is_gated, _FORMAT_KINDS[weight.format]
    )


def pack(weight: PackedWeight, first_row: int, rows: torch.Tensor) -> None:
    """Put rows into their panels; raises ValueError for another dtype or shape, IndexError for rows outside."""
    row_bytes = row_num_bytes(weight.format, weight.num_inputs)
    if rows.dtype is not torch.uint8 or rows.shape[1:] != (row_bytes,):
        raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}, not {torch.uint8} [n, {row_bytes}]")
    if first_row < 0 or first_row + len(rows) > weight.num_outputs:
        raise IndexError(f"rows {first_row} to {first_row + len(rows)} of a weight with {weight.num_outputs}")
    rows = rows.contiguous()
    EXECUTOR.run("grouped_pack", _GroupedPackArgs(_grouped_weight(weight), address(rows), first_row), len(rows))


def _multiply(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    activation: Activation | None,
    result: torch.Tensor,
) -> torch.Tensor:
    if x.shape[1:] != (weight.num_inputs,):
        raise ValueError(f"x is {list(x.shape)}, not [n, {weight.num_inputs}]")
    num_groups = weight.num_inputs // WEIGHTS_PER_BLOCK
    rounded = EXECUTOR.empty((-(-len(x) // _BLOCK_ROWS), num_groups, _ROW_GROUP_BYTES), torch.uint8)
    output = linear_output(result, weight, bias, activation)
    args = _GroupedLinearArgs(address(x), element_kind(x.dtype), _grouped_weight(weight), address(rounded), output)
    EXECUTOR.run("grouped_linear", args, len(x))
    return result


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """As `packed_linear`."""
    return _multiply(x, weight, bias, None, EXECUTOR.empty((x.shape[0], weight.num_outputs), x.dtype))


def gated_linear(
    x: torch.Tensor, weight: PackedWeight, activation: Activation, bias: torch.Tensor | None
) -> torch.Tensor:
    """As `packed_gated_linear`; the products stay in fp32 until the end."""
    result = EXECUTOR.empty((x.shape[0], weight.num_outputs // 2), x.dtype)
    return _multiply(x, weight, bias, activation, result)


def logits(hidden: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """As `packed_logits`."""
    return _multiply(hidden, weight, None, None, LOGITS.empty((hidden.shape[0], weight.num_outputs)))


def embedding(token_ids: torch.Tensor, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """As `packed_embedding`."""
    if token_ids.dtype is not torch.int64:
        raise ValueError(f"token ids are {token_ids.dtype}, not int64")
    result = EXECUTOR.empty((len(token_ids), weight.num_inputs), dtype)
    args = _GroupedEmbeddingArgs(_grouped_weight(weight), address(token_ids), address(result), element_kind(dtype))
    EXECUTOR.run("grouped_embedding", args, len(token_ids))
    return result
