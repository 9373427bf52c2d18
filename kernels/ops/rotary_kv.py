"""Rotary embedding of the queries and keys of a fused projection, and the write of its keys and values, in one op.

On a CPU the three together are one pass over the projection. The reference is the three ops one after the other, so
that backends that have kernels for those need none for this.
"""

from __future__ import annotations

import torch

from octavo.kernels.ops.attention import HeadShape, write_kv
from octavo.kernels.ops.rotary import rotary
from octavo.kernels.registry import op


@op
def rotary_and_write_kv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    heads: HeadShape,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn queries and keys by their positions, store keys and values in their slots, and return the queries.

    Args:
        qkv: [num_tokens, (num_query_heads + 2 · num_kv_heads) · head_dim], queries, keys, values. A backend may turn
            the queries where they lie: what qkv holds afterwards is not defined.
        positions: int64 [num_tokens].
        cos_sin: fp32 [max_position, rotary_dim], rotary_dim up to head_dim; see `rotary`.
        kv_cache: one layer's; see `write_kv`, also for what follows.
        slot_mapping: int64 [num_tokens].
        kv_scales: fp32 [2], for an fp8 cache.

    Returns:
        The queries, [num_tokens, num_query_heads, head_dim]; the heads of a token lie side by side, tokens may have
        gaps between them. Shares the memory of `qkv` where the backend turns in place.

    Raises:
        IndexError: a slot is outside the cache or a position outside `cos_sin`.
    """
    by_head = qkv.view(qkv.shape[0], -1, heads.head_dim)
    query, key, value = by_head.split((heads.num_query_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
    query, key = rotary(query, key, positions, cos_sin)
    write_kv(key, value, kv_cache, slot_mapping, kv_scales)
    return query
