"""What a model says at every position of a prompt, without a runner."""

from __future__ import annotations

import torch

from octavo.worker.layers.attention import AttentionMetadata
from octavo.worker.models.llama import LlamaForCausalLM


@torch.inference_mode()
def all_logits(model: LlamaForCausalLM, prompt: list[int], block_size: int = 16) -> torch.Tensor | None:
    """Return fp32 [len(prompt), vocab_size], computed in one step; None on the ranks that get no logits."""
    num_tokens, sizes = len(prompt), model.kv_shape
    num_blocks = -(-num_tokens // block_size)
    shape = (sizes.num_layers, 2, num_blocks, block_size, sizes.num_kv_heads, sizes.head_dim)
    kv_cache = torch.full(shape, torch.nan, dtype=model.norm.weight.dtype)
    positions = torch.arange(num_tokens)
    metadata = AttentionMetadata(
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
        torch.arange(num_blocks, dtype=torch.int32)[None],
        positions,
    )
    return model.compute_logits(model(torch.tensor(prompt), positions, kv_cache, metadata))
