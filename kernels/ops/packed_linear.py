"""Matrix products with weights that a backend holds in a layout of its own, packed once when they are loaded.

A weight comes in rows of its storage format: bfloat16 or fp32 numbers, or the blocks of a GGUF file, which are never
widened. Blocks hold 32 neighbouring weights of a row, as whole numbers (codes) behind their scale, and for some a
minimum: weight = scale · code + minimum. A backend multiplies blocks with activations that it rounds to whole numbers
of 8 bits or more, with a scale for each 32 or 128 inputs, so that the sum of a block has no rounding and no order; the
sums of blocks are added in fp32, from the first to the last. bfloat16 and fp32 weights multiply as they are.

The references here keep rows as they come, one behind the other, and multiply with the widened weights; a backend's
result differs from theirs by the rounding of activations and the order of sums.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch

from octavo.kernels.ops.activation import gelu_mul, silu_mul
from octavo.kernels.registry import op

WEIGHTS_PER_BLOCK = 32


class WeightFormat(StrEnum):
    """How a weight is stored; blocks bear the names of GGUF (ggml)."""

    FLOAT32 = "F32"
    BFLOAT16 = "BF16"
    Q8_0 = "Q8_0"  # fp16 scale, 32 int8 codes
    Q4_0 = "Q4_0"  # fp16 scale, 32 codes of 4 bits less 8: weight i in the low half of byte i, i + 16 in the high half
    Q4_1 = "Q4_1"  # fp16 scale, fp16 minimum, 32 codes of 4 bits in the same places


ROW_DTYPES = {WeightFormat.FLOAT32: torch.float32, WeightFormat.BFLOAT16: torch.bfloat16}
BLOCK_BYTES = {WeightFormat.Q8_0: 34, WeightFormat.Q4_0: 18, WeightFormat.Q4_1: 20}


class Activation(StrEnum):
    """The function of the gate in a gated feed-forward layer."""

    SILU = "silu"
    GELU = "gelu"


class PackedWeight(NamedTuple):
    """A weight [num_outputs, num_inputs] in the layout of the backend that packed it.

    Attributes:
        data: uint8 [packed_num_bytes(...)], zeros before the first row is packed.
        is_gated: the first half of the outputs are gates, the other half what they gate; the backend may put each gate
            beside its partner.
    """

    data: torch.Tensor
    format: WeightFormat
    num_outputs: int
    num_inputs: int
    is_gated: bool = False


def row_num_bytes(weight_format: WeightFormat, num_inputs: int) -> int:
    """Return the bytes of one row in its storage format; raises ValueError when it is not a whole number of blocks."""
    if weight_format in ROW_DTYPES:
        return num_inputs * ROW_DTYPES[weight_format].itemsize
    num_blocks, rest = divmod(num_inputs, WEIGHTS_PER_BLOCK)
    if rest:
        raise ValueError(f"{num_inputs} inputs are not whole blocks of {WEIGHTS_PER_BLOCK}")
    return num_blocks * BLOCK_BYTES[weight_format]


def dequantize_rows(rows: torch.Tensor, weight_format: WeightFormat) -> torch.Tensor:
    """Return fp32 [n, num_inputs] of uint8 [n, row_num_bytes]; each weight to the bit what the format means."""
    if weight_format in ROW_DTYPES:
        return rows.contiguous().view(ROW_DTYPES[weight_format]).float()
    blocks = rows.reshape(-1, BLOCK_BYTES[weight_format])
    has_minimum = weight_format is WeightFormat.Q4_1
    head_bytes = 4 if has_minimum else 2
    head = blocks[:, :head_bytes].contiguous().view(torch.float16).float()
    codes = blocks[:, head_bytes:].contiguous()
    if weight_format is WeightFormat.Q8_0:
        weights = codes.view(torch.int8) * head
    else:
        numbers = torch.cat((codes & 15, codes >> 4), dim=1).float()
        weights = numbers * head[:, :1] + head[:, 1:] if has_minimum else (numbers - 8) * head
    return weights.view(len(rows), -1)


@op
def packed_num_bytes(weight_format: WeightFormat, num_outputs: int, num_inputs: int, is_gated: bool = False) -> int:
    """Return the size of a packed weight, in bytes."""
    return num_outputs * row_num_bytes(weight_format, num_inputs)


@op
def pack_rows(weight: PackedWeight, first_row: int, rows: torch.Tensor) -> None:
    """Put rows of a weight into their places.

    Args:
        first_row: of the weight, which row the first one is.
        rows: [n, num_inputs] of the format's dtype; or uint8 [n, row_num_bytes] for blocks. May lie in a mapped file.
    """
    row_bytes = row_num_bytes(weight.format, weight.num_inputs)
    stored = rows.contiguous().view(torch.uint8).view(len(rows), row_bytes)
    weight.data.view(-1, row_bytes)[first_row : first_row + len(rows)] = stored


def _widened(weight: PackedWeight) -> torch.Tensor:
    return dequantize_rows(weight.data.view(weight.num_outputs, -1), weight.format)


@op
def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x Wᵀ + b.

    Args:
        x: [num_tokens, num_inputs], fp32 or bfloat16; bfloat16 for a bfloat16 weight.
        bias: [num_outputs], of the dtype of x, or None.

    Returns:
        [num_tokens, num_outputs], contiguous, in the dtype of x; sums are fp32.
    """
    product = x.float() @ _widened(weight).t()
    return (product if bias is None else product + bias.float()).to(x.dtype)


@op
def packed_gated_linear(
    x: torch.Tensor, weight: PackedWeight, activation: Activation, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return activation(x Gᵀ + b) · (x Uᵀ + c), where G and U are the halves of a gated weight; see `silu_mul`.

    Args:
        bias: [num_outputs], of the gates and then of the others; or None.

    Returns:
        [num_tokens, num_outputs / 2], contiguous, in the dtype of x. A backend may keep the product of the weights in
        fp32 until the end.
    """
    product = packed_linear(x, weight, bias)
    return silu_mul(product) if activation is Activation.SILU else gelu_mul(product)


@op
def packed_logits(hidden: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Return hidden Wᵀ in fp32: the logits of a vocabulary, or of a part of it; fp32 [N, num_outputs]."""
    return hidden.float() @ _widened(weight).t()


@op
def packed_embedding(token_ids: torch.Tensor, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of a weight, widened from its format, in `dtype`.

    Args:
        token_ids: int64 [num_tokens].

    Returns:
        [num_tokens, num_inputs].

    Raises:
        IndexError: a token id is not a row of the weight.
    """
    rows = weight.data.view(weight.num_outputs, -1)[token_ids]
    return dequantize_rows(rows, weight.format).to(dtype)
