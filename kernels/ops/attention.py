"""Attention over the paged KV cache, and the writes into it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.kernels.registry import op


@op
def write_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store each token's key and value in its slot.

    Args:
        key: [num_tokens, num_kv_heads, head_dim].
        value: the same.
        kv_cache: one layer's, [2, num_blocks, block_size, num_kv_heads, head_dim]; written.
        slot_mapping: int64 [num_tokens], block_id · block_size + offset; no slot twice.
    """
    slots = kv_cache.view(2, -1, *kv_cache.shape[3:])
    slots[0].index_copy_(0, slot_mapping, key)
    slots[1].index_copy_(0, slot_mapping, value)


@op
def copy_blocks(
    source_cache: torch.Tensor, destination_cache: torch.Tensor, block_pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy whole blocks, over all layers.

    Args:
        source_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].
        destination_cache: the same but for num_blocks; may be the same tensor, or on another device; written.
        block_pairs: (source block id, destination block id); no destination twice. A source is read before any
            destination is written.
    """
    if not block_pairs:
        return
    sources, destinations = (torch.tensor(ids, dtype=torch.int64) for ids in zip(*block_pairs, strict=True))
    blocks = source_cache.index_select(2, sources.to(source_cache.device))
    destination_cache.index_copy_(2, destinations.to(destination_cache.device), blocks.to(destination_cache.device))


@op
def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of every query over the keys and values of its request.

    Args:
        query: [num_tokens, num_query_heads, head_dim].
        kv_cache: one layer's, [2, num_blocks, block_size, num_kv_heads, head_dim].
        query_start_loc: int32 [num_requests + 1].
        seq_lens: int32 [num_requests], tokens with valid KV, this step's among them.
        block_tables: int32 [num_requests, max_blocks].
        scale: factor of the scores.
        out: receives the result when given.

    Returns:
        [num_tokens, num_query_heads, head_dim].
    """
    result = torch.empty_like(query) if out is None else out
    block_size = kv_cache.shape[2]
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    group = query.shape[1] // kv_cache.shape[3]
    for row, seq_len in enumerate(lens):
        first, last = starts[row], starts[row + 1]
        blocks = block_tables[row, : -(-seq_len // block_size)].long()
        keys, values = kv_cache[:, blocks].flatten(1, 2)[:, :seq_len].float().transpose(1, 2)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = query[first:last].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        positions = torch.arange(seq_len - (last - first), seq_len, device=query.device)
        is_hidden = torch.arange(seq_len, device=query.device) > positions[:, None]
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        result[first:last] = (weights @ values).transpose(0, 1).to(query.dtype)
    return result
