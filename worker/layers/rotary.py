"""Rotary position embedding: the table of cosines and sines of every position (RoFormer, Su et al. 2021).

Scaling changes the frequencies only, so every variant is one function from options to frequencies. Frequencies and
table are fp32. Dynamic NTK scaling raises the base with the length of the request, after keys with another base are
in the cache; we take the base of the longest context served instead, for every request. So the answer does not depend
on how a request was cut into steps, and a server whose `max_model_len` is within the trained length has the plain base.
"""

from __future__ import annotations

import math

import torch

from octavo.worker.models.rope_config import RopeConfig, RopeType


def _plain_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / theta**exponents


def _dynamic_theta(rope: RopeConfig, head_dim: int, num_positions: int) -> float:
    """NTK-aware base for contexts of `num_positions`, https://arxiv.org/abs/2309.00071 appendix A.1 and B.3."""
    growth = max(num_positions / rope.original_max_position_embeddings, 1.0)
    return rope.theta * (rope.factor * growth - (rope.factor - 1)) ** (head_dim / (head_dim - 2))


def _llama3_frequencies(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Keep short wavelengths, stretch long ones by `factor`, interpolate between (Llama 3.1 reference code)."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    share_kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share_kept = share_kept.clamp(0.0, 1.0)
    return (1 - share_kept) * plain / rope.factor + share_kept * plain


def rotary_frequencies(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return fp32 [head_dim / 2], radians per position."""
    if rope.rope_type is RopeType.DYNAMIC:
        return _plain_frequencies(_dynamic_theta(rope, head_dim, num_positions), head_dim)
    plain = _plain_frequencies(rope.theta, head_dim)
    match rope.rope_type:
        case RopeType.LINEAR:
            return plain / rope.factor
        case RopeType.LLAMA3:
            return _llama3_frequencies(rope, plain)
        case _:
            return plain


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """Return fp32 [num_positions, head_dim]: the cosines of a position, then its sines."""
    frequencies = rotary_frequencies(rope, head_dim, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
