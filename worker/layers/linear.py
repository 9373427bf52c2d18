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

from octavo.kernels.ops.linear import linear
from octavo.worker.distributed import TensorParallelGroup
from octavo.worker.layers.weight_slot import WeightSlot, empty_parameter


class Rows(NamedTuple):
    """The outputs of one checkpoint tensor: how many it has, and which are this rank's."""

    num_total: int
    own: range


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b, where W stacks this rank's rows of each of `parts`."""

    def __init__(
        self,
        input_size: int,
        parts: Mapping[str, Rows],
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`parts` is keyed by the checkpoint's name of each part, such as `q_proj`."""
        super().__init__()
        self.parts = dict(parts)
        num_rows = sum(len(part.own) for part in self.parts.values())
        self.weight = empty_parameter(num_rows, input_size, dtype=dtype, device=device)
        self.bias = empty_parameter(num_rows, dtype=dtype, device=device) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, input_size] -> [T, Σ rows of this rank]."""
        return linear(x, self.weight, self.bias)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Yield the slots of every part, named `<part>.weight` and `<part>.bias`."""
        first_row = 0
        for name, part in self.parts.items():
            for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
                if parameter is not None:
                    load = partial(_load_rows, parameter, first_row)
                    yield WeightSlot(f"{name}.{kind}", (part.num_total, *parameter.shape[1:]), load, part.own)
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
        dtype: torch.dtype,
        device: torch.device,
        group: TensorParallelGroup,
    ) -> None:
        """`name` is the checkpoint's, such as `o_proj`; `input_size` counts the inputs of all ranks."""
        super().__init__()
        self.name, self.input_size, self.own_inputs = name, input_size, own_inputs
        self.group = group
        self.has_bias = has_bias
        self.weight = empty_parameter(output_size, len(own_inputs), dtype=dtype, device=device)
        adds_bias = has_bias and group.rank == 0
        self.bias = empty_parameter(output_size, dtype=dtype, device=device) if adds_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs of this rank] -> [T, output_size], the same on every rank."""
        return self.group.all_reduce(linear(x, self.weight, self.bias))

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Yield `<name>.weight` and `<name>.bias`; ranks without the bias want no row of it."""
        num_outputs = self.weight.shape[0]
        load = partial(_load_columns, self.weight, self.own_inputs)
        yield WeightSlot(f"{self.name}.weight", (num_outputs, self.input_size), load)
        if self.bias is not None:
            yield WeightSlot(f"{self.name}.bias", (num_outputs,), self.bias.copy_)
        elif self.has_bias:
            yield WeightSlot(f"{self.name}.bias", (num_outputs,), lambda no_rows: None, range(0))


def _load_rows(parameter: torch.Tensor, first_row: int, loaded: torch.Tensor) -> None:
    parameter[first_row : first_row + loaded.shape[0]].copy_(loaded)


def _load_columns(parameter: torch.Tensor, columns: range, loaded: torch.Tensor) -> None:
    parameter.copy_(loaded[:, columns.start : columns.stop])
