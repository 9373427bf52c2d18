"""How keys and values are stored in 8 bits.

An fp8 cache holds e4m3 numbers, value / scale, with one scale for a layer's keys and one for its values, which the
model brings along. An int8 cache needs no scales from outside: every vector (of one token, one head) brings its own,
largest |number| / 127, as an fp32 number behind its codes; so its last dimension is head_dim + 4 bytes. Four bytes of
68 or more are a small price for an error that follows the vector.
"""

from __future__ import annotations

import torch

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
INT8_MAX = 127.0
SCALE_BYTES = 4


def kv_vector_size(dtype: torch.dtype, head_dim: int) -> int:
    """Return the last dimension of a cache of `dtype`: the elements that hold a vector of `head_dim` numbers."""
    return head_dim + SCALE_BYTES if dtype is torch.int8 else head_dim


def to_fp8(vectors: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the nearest e4m3 numbers to vectors / scale, at most 448 in size."""
    return (vectors.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def to_int8(vectors: torch.Tensor) -> torch.Tensor:
    """Return int8 [..., head_dim + 4] of vectors [..., head_dim]: codes, then the scale; a vector of zeros has 0."""
    wide = vectors.float()
    scales = wide.abs().amax(-1, keepdim=True) * (1 / INT8_MAX)
    codes = (wide / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(-INT8_MAX, INT8_MAX)
    return torch.cat((codes.to(torch.int8), scales.view(torch.int8)), dim=-1)


def from_int8(stored: torch.Tensor) -> torch.Tensor:
    """Return fp32 [..., head_dim] of int8 [..., head_dim + 4]."""
    return stored[..., :-SCALE_BYTES].float() * stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
