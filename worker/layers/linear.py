"""Linear layers of a tensor-parallel group (Megatron-LM, Shoeybi et al. 2019).

A column-parallel layer gives each rank some of the outputs, a row-parallel one some of the inputs; one behind the other
they need a single all-reduce. A layer of several checkpoint tensors in one matrix product (query, key and value; gate
and up) is data: its parts in order, each with its rows in the checkpoint and those of this rank. Invariants: row r of a
part's product equals the row that the whole layer would give; a bias is added once. In a group of one, every share is
the whole and the arithmetic that of the plain layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from octavo.kernels.ops.packed_linear import Activation
from octavo.worker.distributed import TensorParallelGroup
from octavo.worker.layers.linear_weight import LinearWeight, WeightFactory, select_columns
from octavo.worker.layers.weight_slot import WeightSlot, load_into


class Rows(NamedTuple):
    """The outputs of one checkpoint tensor: how many it has, and which are this rank's."""

    num_total: int
    own: range


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b, where W stacks this rank's rows of each of `parts`.

    With an activation the first half of the rows are gates: y = activation(gates) · others.
    """

    def __init__(
        self,
        input_size: int,
        parts: Mapping[str, Rows],
        has_bias: bool,
        make: WeightFactory,
        activation: Activation | None = None,
    ) -> None:
        """`parts` is keyed by the checkpoint's name of each part, such as `q_proj`."""
        super().__init__()
        self.parts = dict(parts)
        self.prefix = make.prefix
        self.input_size = input_size
        self.activation = activation
        num_rows = sum(len(part.own) for part in self.parts.values())
        names = [f"{name}.weight" for name in self.parts]
        self.weight = make.matrix(names, num_rows, range(input_size), is_gated=activation is not None)
        self.bias = make.vector(num_rows) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, input_size] -> [T, Σ rows of this rank], half of that with an activation."""
        if self.activation is None:
            return self.weight.multiply(x, self.bias)
        return self.weight.multiply_gated(x, self.activation, self.bias)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Yield the slots of every part, named `<part>.weight` and `<part>.bias`."""
        first_row = 0
        for name, part in self.parts.items():
            full_name, shape = f"{self.prefix}{name}", (part.num_total, self.input_size)
            load = partial(_load_behind, first_row, self.weight)
            yield WeightSlot(f"{full_name}.weight", shape, load, part.own, self.weight.blocks)
            if self.bias is not None:
                own_bias = self.bias[first_row : first_row + len(part.own)]
                yield WeightSlot(f"{full_name}.bias", shape[:1], partial(load_into, own_bias), part.own)
            first_row += len(part.own)


class RowParallelLinear(nn.Module):
    """y = Σ over the ranks of x Wᵀ, + b; W has this rank's columns, and x the inputs that belong to them."""

    def __init__(
        self,
        name: str,
        input_size: int,
        own_inputs: range,
        output_size: int,
        has_bias: bool,
        make: WeightFactory,
        group: TensorParallelGroup,
    ) -> None:
        """`name` is the checkpoint's, such as `o_proj`; `input_size` counts the inputs of all ranks."""
        super().__init__()
        self.name = f"{make.prefix}{name}"
        self.input_size, self.own_inputs, self.output_size = input_size, own_inputs, output_size
        self.group = group
        self.has_bias = has_bias
        self.weight = make.matrix([f"{name}.weight"], output_size, own_inputs)
        self.bias = make.vector(output_size) if has_bias and group.rank == 0 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs of this rank] -> [T, output_size], the same on every rank."""
        return self.group.all_reduce(self.weight.multiply(x, self.bias))

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Yield `<name>.weight` and `<name>.bias`; ranks without the bias want no row of it."""
        load = partial(_load_columns, self.weight, self.own_inputs)
        shape = (self.output_size, self.input_size)
        yield WeightSlot(f"{self.name}.weight", shape, load, blocks=self.weight.blocks)
        if self.bias is not None:
            yield WeightSlot(f"{self.name}.bias", shape[:1], partial(load_into, self.bias))
        elif self.has_bias:
            yield WeightSlot(f"{self.name}.bias", shape[:1], lambda first_row, no_rows: None, range(0))


def _load_behind(num_rows_before: int, weight: LinearWeight, first_row: int, rows: torch.Tensor) -> None:
    weight.load_rows(num_rows_before + first_row, rows)


def _load_columns(weight: LinearWeight, columns: range, first_row: int, rows: torch.Tensor) -> None:
    weight.load_rows(first_row, select_columns(rows, columns, weight.blocks))
