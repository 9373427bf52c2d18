"""Products with bfloat16 and fp32 weights on the CPU; their layout is in csrc/dense_layout.h."""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.arguments import address, element_kind
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.cpu.kept_memory import LOGITS
from octavo.kernels.cpu.linear_arguments import LinearOutput, linear_output
from octavo.kernels.ops.packed_linear import ROW_DTYPES, Activation, PackedWeight, WeightFormat

_PANEL_COLUMNS = 32
_INPUTS_PER_TILE = 32


class _DenseWeight(ctypes.Structure):
    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("is_gated", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
    )


class _DenseLinearArgs(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_is_bf16", ctypes.c_int64),
        ("weight", _DenseWeight),
        ("output", LinearOutput),
    )


class _DensePackArgs(ctypes.Structure):
    _fields_ = (("weight", _DenseWeight), ("rows", ctypes.c_void_p), ("first_row", ctypes.c_int64))


class _DenseEmbeddingArgs(ctypes.Structure):
    _fields_ = (
        ("weight", _DenseWeight),
        ("token_ids", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("is_bf16", ctypes.c_int64),
    )


def num_bytes(weight_format: WeightFormat, num_outputs: int, num_inputs: int, is_gated: bool) -> int:
    """Return the size of whole panels; raises ValueError for a gated weight with an odd number of outputs."""
    if is_gated and num_outputs % 2:
        raise ValueError(f"a gated weight has {num_outputs} outputs, which are not two halves")
    num_columns = num_outputs // 2 if is_gated else num_outputs
    num_panels = -(-num_columns // (_PANEL_COLUMNS // 2 if is_gated else _PANEL_COLUMNS))
    if weight_format is WeightFormat.BFLOAT16:
        num_inputs = -(-num_inputs // _INPUTS_PER_TILE) * _INPUTS_PER_TILE
    return num_panels * _PANEL_COLUMNS * num_inputs * ROW_DTYPES[weight_format].itemsize


def _dense_weight(weight: PackedWeight) -> _DenseWeight:
    return _DenseWeight(
        address(weight.data),
        weight.num_outputs,
        weight.num_inputs,
        weight.is_gated,
        weight.format is WeightFormat.BFLOAT16,
    )


def pack(weight: PackedWeight, first_row: int, rows: torch.Tensor) -> None:
    """Put rows into their panels; raises ValueError for another dtype or shape, IndexError for rows outside."""
    dtype = ROW_DTYPES[weight.format]
    if rows.dtype is not dtype or rows.shape[1:] != (weight.num_inputs,):
        raise ValueError(f"rows are {rows.dtype} {list(rows.shape)}, not {dtype} [n, {weight.num_inputs}]")
    if first_row < 0 or first_row + len(rows) > weight.num_outputs:
        raise IndexError(f"rows {first_row} to {first_row + len(rows)} of a weight with {weight.num_outputs}")
    rows = rows.contiguous()
    EXECUTOR.run("dense_pack", _DensePackArgs(_dense_weight(weight), address(rows), first_row), len(rows))


def _multiply(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    activation: Activation | None,
    result: torch.Tensor,
) -> torch.Tensor:
    if x.shape[1:] != (weight.num_inputs,):
        raise ValueError(f"x is {list(x.shape)}, not [n, {weight.num_inputs}]")
    if weight.format is WeightFormat.BFLOAT16 and x.dtype is not torch.bfloat16:
        raise ValueError(f"x is {x.dtype} with a bfloat16 weight")
    output = linear_output(result, weight, bias, activation)
    args = _DenseLinearArgs(address(x), element_kind(x.dtype), _dense_weight(weight), output)
    EXECUTOR.run("dense_linear", args, x.shape[0])
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
    args = _DenseEmbeddingArgs(_dense_weight(weight), address(token_ids), address(result), element_kind(dtype))
    EXECUTOR.run("dense_embedding", args, len(token_ids))
    return result
