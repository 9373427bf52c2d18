"""How a tensor of a checkpoint reaches the parameter that it belongs to.

Each layer lists the tensors that it wants by the names that a checkpoint gives them, each with the shape that it must
have, the rows of it that this rank holds, and the layer's own way to take those in. So the loader knows nothing of
fused projections and shares, and what a layer does with a tensor (place it in rows of a larger one, take some of its
columns) is written in the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch


class WeightSlot(NamedTuple):
    """The place of one checkpoint tensor.

    Attributes:
        name: name in a Hugging Face checkpoint, such as `model.layers.0.self_attn.q_proj.weight`.
        shape: shape that the whole tensor must have there.
        load: takes `rows` of the tensor in, of any floating dtype; call it once, not on the meta device.
        rows: what `load` wants of the first dimension; None: the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], object]
    rows: range | None = None


def whole_parameter(name: str, parameter: torch.Tensor) -> WeightSlot:
    """Return the slot of a tensor that fills `parameter`."""
    return WeightSlot(name, tuple(parameter.shape), parameter.copy_)


def with_prefix(prefix: str, slots: Iterator[WeightSlot]) -> Iterator[WeightSlot]:
    """Yield `slots` with `prefix` and a dot before their names."""
    return (slot._replace(name=f"{prefix}.{slot.name}") for slot in slots)


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """Return a parameter for inference; its memory is not touched before it is loaded."""
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
