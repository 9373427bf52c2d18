"""Self-attention over the paged KV cache.

Each token's key and value are written to its slot, then every query attends over its request's blocks up to its own
position. Nothing is kept between calls: positions, tables and cache are arguments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from octavo.kernels.ops.attention import AttentionPlan, HeadShape, paged_attention
from octavo.kernels.ops.kv_formats import FP8_DTYPE
from octavo.kernels.ops.rotary_kv import rotary_and_write_kv


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
    """Rotary embedding, KV write and attention of this rank's heads of one layer, between its two projections.

    An fp8 cache is scaled by `kv_scales`, of keys and of values: 1 unless the checkpoint has them.
    """

    kv_scales: torch.Tensor

    def __init__(
        self, num_query_heads: int, num_kv_heads: int, head_dim: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.heads = HeadShape(num_query_heads, num_kv_heads, head_dim)
        self.scale = head_dim**-0.5
        self.register_buffer("kv_scales", torch.ones(2, dtype=torch.float32, device=device), persistent=False)

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
            qkv: [T, (num_query_heads + 2 · num_kv_heads) · head_dim]; may be overwritten.
            positions: int64 [T].
            cos_sin: table of layers.rotary.
            kv_cache: this layer's, [2, num_blocks, block_size, num_kv_heads, head_dim]; written at `slot_mapping`.
                int8: head_dim + 4.

        Returns:
            [T, num_query_heads · head_dim].
        """
        kv_scales = self.kv_scales if kv_cache.dtype is FP8_DTYPE else None
        query = rotary_and_write_kv(qkv, positions, cos_sin, kv_cache, metadata.slot_mapping, self.heads, kv_scales)
        attended = paged_attention(
            query,
            kv_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            self.scale,
            kv_scales=kv_scales,
            plan=metadata.plan,
        )
        return attended.flatten(1)
