"""Packed weights on the CPU: each op goes to the module of the weight's format.

bfloat16 and fp32 weights are `dense_linear`, blocks of GGUF files are `grouped_linear`; both have the same functions.
"""

from __future__ import annotations

from types import ModuleType

import torch

from octavo.kernels.cpu import dense_linear, grouped_linear
from octavo.kernels.ops.packed_linear import (
    ROW_DTYPES,
    Activation,
    PackedWeight,
    WeightFormat,
    pack_rows,
    packed_embedding,
    packed_gated_linear,
    packed_linear,
    packed_logits,
    packed_num_bytes,
)
from octavo.kernels.registry import backend


def _module(weight_format: WeightFormat) -> ModuleType:
    return dense_linear if weight_format in ROW_DTYPES else grouped_linear


@backend("cpu", implements=packed_num_bytes)
def cpu_packed_num_bytes(weight_format: WeightFormat, num_outputs: int, num_inputs: int, is_gated: bool = False) -> int:
    return _module(weight_format).num_bytes(weight_format, num_outputs, num_inputs, is_gated)


@backend("cpu", implements=pack_rows)
def cpu_pack_rows(weight: PackedWeight, first_row: int, rows: torch.Tensor) -> None:
    _module(weight.format).pack(weight, first_row, rows)


@backend("cpu", implements=packed_linear)
def cpu_packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _module(weight.format).linear(x, weight, bias)


@backend("cpu", implements=packed_gated_linear)
def cpu_packed_gated_linear(
    x: torch.Tensor, weight: PackedWeight, activation: Activation, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return _module(weight.format).gated_linear(x, weight, activation, bias)


@backend("cpu", implements=packed_logits)
def cpu_packed_logits(hidden: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    return _module(weight.format).logits(hidden, weight)


@backend("cpu", implements=packed_embedding)
def cpu_packed_embedding(token_ids: torch.Tensor, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    return _module(weight.format).embedding(token_ids, weight, dtype)
