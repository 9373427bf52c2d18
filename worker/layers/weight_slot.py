"""How a tensor of a checkpoint reaches the parameter that it belongs to.

Each layer lists the tensors that it wants by the names that a checkpoint gives them, each with the shape that it must
have, the rows of it that this rank holds, the format in which it takes them, and its own way to take them in. So the
loader knows nothing of fused projections and shares, and what a layer does with a tensor (place it in rows of a larger
one, take some of its columns) is written in the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from octavo.kernels.ops.packed_linear import WeightFormat


class WeightSlot(NamedTuple):
    """The place of one checkpoint tensor.

    Attributes:
        name: name in a Hugging Face checkpoint, such as `model.layers.0.self_attn.q_proj.weight`.
        shape: shape that the whole tensor must have there.
        load: takes some of `rows` in, from the one of this index on; not on the meta device. Every one of `rows` must
            be given once.
        rows: what `load` wants of the first dimension; None: the whole tensor.
        blocks: the form of the rows: uint8 [n, bytes of a row] in this format; None: numbers of any floating dtype.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[int, torch.Tensor], object]
    rows: range | None = None
    blocks: WeightFormat | None = None


def load_into(parameter: torch.Tensor, first_row: int, rows: torch.Tensor) -> None:
    """Put rows into their places in `parameter`."""
    parameter[first_row : first_row + len(rows)].copy_(rows)


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """Return a parameter for inference; its memory is not touched before it is loaded."""
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
