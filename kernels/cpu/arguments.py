"""Tensors as arguments of C."""

from __future__ import annotations

import torch

_ELEMENT_KINDS = {torch.float32: 0, torch.bfloat16: 1}


def address(tensor: torch.Tensor | None) -> int | None:
    """Return where the data of a contiguous tensor begins, None for None; raises ValueError for one with gaps."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of {list(tensor.shape)} with strides {tensor.stride()} is not contiguous")
    return tensor.data_ptr()


def typed_address(tensor: torch.Tensor | None, dtype: torch.dtype) -> int | None:
    """Return the address of a tensor that the kernel reads as `dtype`; raises TypeError for another one."""
    if tensor is not None and tensor.dtype != dtype:
        raise TypeError(f"a tensor of {tensor.dtype} where {dtype} is meant")
    return address(tensor)


def element_kind(dtype: torch.dtype) -> int:
    """Return how kernels know the dtype: 0 fp32, 1 bf16; raises ValueError for another one."""
    kind = _ELEMENT_KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"the CPU kernels do not compute in {dtype}")
    return kind
