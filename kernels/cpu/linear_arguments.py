"""The arguments of kernels with packed weights (csrc/linear_parts.h, dense_layout.h, grouped_layout.h)."""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.arguments import address, element_kind
from octavo.kernels.ops.packed_linear import Activation, PackedWeight, WeightFormat

_ACTIVATION_KINDS = {None: 0, Activation.SILU: 1, Activation.GELU: 2}
_FORMAT_KINDS = {
    WeightFormat.FLOAT32: 0,
    WeightFormat.BFLOAT16: 1,
    WeightFormat.Q8_0: 0,
    WeightFormat.Q4_0: 1,
    WeightFormat.Q4_1: 2,
}
"""Dense and grouped formats each count from 0: they have kernels of their own."""


class HeldWeight(ctypes.Structure):
    """A packed weight: `DenseWeight`, or `GroupedWeight`."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("is_gated", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


class LinearOutput(ctypes.Structure):
    """Sums of a product, with a bias added and the gates applied, in the memory of the result."""

    _fields_ = (
        ("to", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
    )


class LinearArgs(ctypes.Structure):
    """Of a product whose activations stay as they are."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_is_bf16", ctypes.c_int64),
        ("weight", HeldWeight),
        ("output", LinearOutput),
    )


class GroupedLinearArgs(ctypes.Structure):
    """Of a product in whole numbers; `rounded` is scratch for the activations."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_is_bf16", ctypes.c_int64),
        ("weight", HeldWeight),
        ("rounded", ctypes.c_void_p),
        ("output", LinearOutput),
    )


class PackArgs(ctypes.Structure):
    """Rows to be packed."""

    _fields_ = (("weight", HeldWeight), ("rows", ctypes.c_void_p), ("first_row", ctypes.c_int64))


class EmbeddingArgs(ctypes.Structure):
    """Rows to be looked up."""

    _fields_ = (
        ("weight", HeldWeight),
        ("token_ids", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("is_bf16", ctypes.c_int64),
    )


def held_weight(weight: PackedWeight) -> HeldWeight:
    """Describe `weight`."""
    return HeldWeight(
        address(weight.data), weight.num_outputs, weight.num_inputs, weight.is_gated, _FORMAT_KINDS[weight.format]
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
