"""Self-attention over the paged KV cache.

Each token's key and value are written to its slot, then every query attends over its request's blocks up to its own
position. Nothing is kept between calls: positions, tables and cache are arguments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from octavo.kernels.ops.attention import AttentionPlan, paged_attention, write_kv
from octavo.kernels.ops.rotary import rotary


class AttentionMetadata(NamedTuple):
    """Where this step's tokens belong; R requests, T tokens.

    Attributes:
        query_start_loc: int32 [R + 1], where each request's tokens begin among the T; the last is T.
        seq_lens: int32 [R], tokens of each request whose KV is valid after this step's write.
        block_tables: int32 [R, max_blocks], block ids in token order; entries past a request's length are not read.
        slot_mapping: int64 [T], slot that receives the key and value of each token; -1 for padding, which has none.
        plan: how the device shares out the attention of this step, on the device; None where it needs no plan.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    plan: AttentionPlan | None = None


class PagedAttention(nn.Module):
    """Rotary embedding, KV write and attention of this rank's heads of one layer, between its two projections."""

    def __init__(self, num_query_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_query_heads = num_query_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attend.

        Args:
            qkv: [T, (num_query_heads + 2 · num_kv_heads) · head_dim].
            positions: int64 [T].
            cos_sin: table of layers.rotary.
            kv_cache: this layer's, [2, num_blocks, block_size, num_kv_heads, head_dim]; written at `slot_mapping`.

        Returns:
            [T, num_query_heads · head_dim].
        """
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        query, key, value = heads.split((self.num_query_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        query, key = rotary(query, key, positions, cos_sin)
        write_kv(key, value, kv_cache, metadata.slot_mapping)
        attended = paged_attention(
            query,
            kv_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            self.scale,
            plan=metadata.plan,
        )
        return attended.flatten(1)
