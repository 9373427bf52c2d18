"""Linear layers, of one checkpoint tensor or of several fused into one matrix product.

A fused layer is data: its outputs in order, each with the name and the number of rows that the checkpoint has for it.
Invariant: row r of the product equals the row that the separate layer would give. Which rows of a tensor this rank
holds is decided here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import nn

from octavo.kernels.ops.linear import linear
from octavo.worker.layers.weight_slot import WeightSlot, empty_parameter


class Linear(nn.Module):
    """y = x Wᵀ + b, where W stacks the weights of `outputs`."""

    def __init__(
        self,
        input_size: int,
        outputs: Mapping[str, int],
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`outputs` maps the checkpoint's name of each part, such as `q_proj`, to its number of rows."""
        super().__init__()
        self.outputs = dict(outputs)
        num_rows = sum(self.outputs.values())
        self.weight = empty_parameter(num_rows, input_size, dtype=dtype, device=device)
        self.bias = empty_parameter(num_rows, dtype=dtype, device=device) if has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, input_size] -> [T, Σ outputs]."""
        return linear(x, self.weight, self.bias)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Yield the slots of every part, named `<part>.weight` and `<part>.bias`."""
        first_row = 0
        for part, num_rows in self.outputs.items():
            for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
                if parameter is not None:
                    load = partial(self._load_rows, parameter, first_row)
                    yield WeightSlot(f"{part}.{kind}", (num_rows, *parameter.shape[1:]), load)
            first_row += num_rows

    @staticmethod
    def _load_rows(parameter: torch.Tensor, first_row: int, loaded: torch.Tensor) -> None:
        parameter[first_row : first_row + loaded.shape[0]].copy_(loaded)
