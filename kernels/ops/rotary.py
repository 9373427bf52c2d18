"""Rotary position embedding (RoFormer, Su et al. 2021) with the two halves of a head as the pairs."""

from __future__ import annotations

import torch

from octavo.kernels.registry import op


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    wide = heads.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], heads[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@op
def rotary(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn each pair (i, i + rotary_dim / 2) of every head by its position's angle; computed in fp32.

    Args:
        query: [num_tokens, num_query_heads, head_dim].
        key: [num_tokens, num_kv_heads, head_dim].
        positions: int64 [num_tokens].
        cos_sin: fp32 [max_position, rotary_dim]; the cosines of a position, then its sines. Elements of a head from
            rotary_dim on are left as they are.

    Returns:
        Query and key, turned, in their dtypes.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)
