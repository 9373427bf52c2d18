"""What kernels of packed weights take alike: where sums go (`LinearOutput` of csrc/linear_parts.h)."""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.arguments import address, element_kind
from octavo.kernels.ops.packed_linear import Activation, PackedWeight

_ACTIVATION_KINDS = {None: 0, Activation.SILU: 1, Activation.GELU: 2}


class LinearOutput(ctypes.Structure):
    """Sums of a product, with a bias added and the gates applied, in the memory of the result."""

    _fields_ = (
        ("to", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
    )


def linear_output(
    result: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, activation: Activation | None
) -> LinearOutput:
    """Describe `result`; raises ValueError for a bias of another dtype or length, or a weight that is gated or not."""
    if bias is not None and (bias.dtype is not result.dtype or bias.shape != (weight.num_outputs,)):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}, not {result.dtype} [{weight.num_outputs}]")
    if weight.is_gated is (activation is None):
        raise ValueError(f"activation is {activation} with a weight whose is_gated is {weight.is_gated}")
    return LinearOutput(
        address(result),
        address(bias),
        weight.num_outputs,
        _ACTIVATION_KINDS[activation],
        element_kind(result.dtype),
    )
