"""The weight of a linear layer, of an embedding or of an output head: plain numbers, or packed for kernels of our own.

A layer asks its factory for a weight and knows nothing of the rest: in which format the weight is held, how rows of a
checkpoint get into it, and which op multiplies with it. Plain weights are tensors of the model's dtype, which torch and
Triton multiply. Packed ones are in a kernel's layout, in the model's dtype or in blocks of GGUF (see
`kernels.ops.packed_linear`); which one is decided from the checkpoint's headers, before there is a model.

Rejected: a branch in every layer; one class of layers for each kind of weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from octavo.kernels.ops.activation import gelu_mul, silu_mul
from octavo.kernels.ops.linear import head_logits, linear
from octavo.kernels.ops.packed_linear import (
    BLOCK_BYTES,
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
)
from octavo.worker.layers.weight_memory import WeightMemory
from octavo.worker.layers.weight_slot import empty_parameter

HEAD_TILE = 2048  # rows of a plain weight that the head has in fp32 at a time

BlockFormatOf = Callable[[Sequence[str]], WeightFormat | None]
"""Names of the checkpoint's tensors that make one weight -> the blocks to hold it in; None: the model's dtype."""


class LinearWeight(Protocol):
    """A matrix [num_outputs, num_inputs].

    Attributes:
        blocks: what `load_rows` takes: uint8 [n, bytes of a row] in this format; None: numbers [n, num_inputs].
    """

    blocks: WeightFormat | None

    def load_rows(self, first_row: int, rows: torch.Tensor) -> None:
        """Put rows of the checkpoint into their places."""
        ...

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x Wᵀ + b, [T, num_outputs]."""
        ...

    def multiply_gated(self, x: torch.Tensor, activation: Activation, bias: torch.Tensor | None) -> torch.Tensor:
        """Return activation(gates) · others, [T, num_outputs / 2], of the halves of x Wᵀ + b."""
        ...

    def prepare_logits(self) -> None:
        """Take the memory that `logits` needs beside the weight."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden Wᵀ in fp32, [N, num_outputs]; after `prepare_logits`."""
        ...

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return rows, [T, num_inputs], in the model's dtype; raises IndexError for an id that is no row."""
        ...


class PlainWeight(nn.Module):
    """A tensor of the model's dtype."""

    blocks = None

    def __init__(self, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.tensor = empty_parameter(num_outputs, num_inputs, dtype=dtype, device=device)
        self.tile: torch.Tensor | None = None

    def load_rows(self, first_row: int, rows: torch.Tensor) -> None:
        self.tensor[first_row : first_row + len(rows)].copy_(rows)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, self.tensor, bias)

    def multiply_gated(self, x: torch.Tensor, activation: Activation, bias: torch.Tensor | None) -> torch.Tensor:
        product = linear(x, self.tensor, bias)
        return silu_mul(product) if activation is Activation.SILU else gelu_mul(product)

    def prepare_logits(self) -> None:
        # Kept, because fresh memory at every step costs more in page faults than the product.
        shape, device = (HEAD_TILE, self.tensor.shape[1]), self.tensor.device
        self.tile = torch.empty(shape, dtype=torch.float32, device=device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.tile is None:
            raise RuntimeError("the weight was not prepared for logits")
        return head_logits(hidden, self.tensor, self.tile)

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.embedding(self.tensor, token_ids)


class HeldPacked(nn.Module):
    """A weight in the layout of the kernels; on the meta device only its size is real."""

    def __init__(
        self,
        weight_format: WeightFormat,
        num_outputs: int,
        num_inputs: int,
        is_gated: bool,
        dtype: torch.dtype,
        memory: WeightMemory,
    ) -> None:
        """`dtype` is the model's."""
        super().__init__()
        self.dtype = dtype
        self.blocks = None if weight_format in ROW_DTYPES else weight_format
        num_bytes = packed_num_bytes(weight_format, num_outputs, num_inputs, is_gated)
        self.data = nn.Parameter(memory.take(num_bytes), requires_grad=False)
        self.packed = PackedWeight(self.data, weight_format, num_outputs, num_inputs, is_gated)

    def load_rows(self, first_row: int, rows: torch.Tensor) -> None:
        if self.blocks is None:
            rows = rows.to(ROW_DTYPES[self.packed.format])
        pack_rows(self.packed, first_row, rows.contiguous())

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return packed_linear(x, self.packed, bias)

    def multiply_gated(self, x: torch.Tensor, activation: Activation, bias: torch.Tensor | None) -> torch.Tensor:
        return packed_gated_linear(x, self.packed, activation, bias)

    def prepare_logits(self) -> None:
        return

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return packed_logits(hidden, self.packed)

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        return packed_embedding(token_ids, self.packed, self.dtype)


PACKED_DTYPES = {dtype: weight_format for weight_format, dtype in ROW_DTYPES.items()}


class WeightFactory(NamedTuple):
    """Makes the weights of the layers of one model, or of a part of it.

    Attributes:
        dtype: of the model.
        device: where it lies.
        memory: of packed weights.
        block_format_of: chooses the formats of packed weights; None: all are plain.
        prefix: of the checkpoint's names in this part, such as `model.layers.0.self_attn.`; empty for the whole model.
    """

    dtype: torch.dtype
    device: torch.device
    memory: WeightMemory
    block_format_of: BlockFormatOf | None = None
    prefix: str = ""

    def inside(self, part: str) -> WeightFactory:
        """Return the factory of a part of this part."""
        return self._replace(prefix=f"{self.prefix}{part}.")

    def matrix(
        self, names: Sequence[str], num_outputs: int, inputs: range, *, is_gated: bool = False
    ) -> PlainWeight | HeldPacked:
        """Return the weight that the tensors `names` of this part make, one behind the other.

        `inputs` are this rank's columns. Where they are not whole blocks the weight is held in the model's dtype.
        """
        if self.block_format_of is None:
            return PlainWeight(num_outputs, len(inputs), self.dtype, self.device)
        blocks = self.block_format_of([f"{self.prefix}{name}" for name in names])
        if blocks is None or inputs.start % WEIGHTS_PER_BLOCK or inputs.stop % WEIGHTS_PER_BLOCK:
            blocks = PACKED_DTYPES[self.dtype]
        return HeldPacked(blocks, num_outputs, len(inputs), is_gated, self.dtype, self.memory)

    def vector(self, num_numbers: int) -> nn.Parameter:
        """Return a bias or the weight of a norm, [num_numbers]."""
        return empty_parameter(num_numbers, dtype=self.dtype, device=self.device)


def select_columns(rows: torch.Tensor, columns: range, blocks: WeightFormat | None) -> torch.Tensor:
    """Return `columns` of rows as `LinearWeight.load_rows` takes them; whole blocks."""
    if blocks is None:
        return rows[:, columns.start : columns.stop]
    first, last = (end // WEIGHTS_PER_BLOCK * BLOCK_BYTES[blocks] for end in (columns.start, columns.stop))
    return rows[:, first:last]
