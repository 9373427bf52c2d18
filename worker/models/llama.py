"""The Llama family: pre-norm decoder layers of grouped-query attention and a gated feed-forward (Llama 2/3, SmolLM2).

A plain function of its arguments: token ids, positions, the KV cache and where the tokens belong in it. Between layers
travel the layer's output and the residual that it still has to be added to, so that each addition is part of the next
norm. The variants of the family (biases, tied head, rotary scaling, sizes) are data of the config.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from octavo.worker.distributed import SINGLE_RANK, TensorParallelGroup
from octavo.worker.kv_cache import KvShape
from octavo.worker.layers.activation import SiluAndMul
from octavo.worker.layers.attention import AttentionMetadata, PagedAttention
from octavo.worker.layers.embedding import Embedding, OutputHead
from octavo.worker.layers.linear import Linear
from octavo.worker.layers.norm import RmsNorm
from octavo.worker.layers.rotary import rotary_table
from octavo.worker.layers.weight_slot import WeightSlot, with_prefix
from octavo.worker.models.config import LlamaConfig


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind its norm."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        query_rows = config.num_query_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        qkv = {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        gate_up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        hidden_size = config.hidden_size
        attention_bias, mlp_bias = config.attention_bias, config.mlp_bias

        self.attention_norm = RmsNorm(hidden_size, config.rms_norm_eps, dtype, device)
        self.qkv_proj = Linear(hidden_size, qkv, attention_bias, dtype, device)
        self.attention = PagedAttention(config.num_query_heads, config.num_kv_heads, config.head_dim)
        self.o_proj = Linear(query_rows, {"o_proj": hidden_size}, attention_bias, dtype, device)
        self.mlp_norm = RmsNorm(hidden_size, config.rms_norm_eps, dtype, device)
        self.gate_up_proj = Linear(hidden_size, gate_up, mlp_bias, dtype, device)
        self.activation = SiluAndMul()
        self.down_proj = Linear(config.intermediate_size, {"down_proj": hidden_size}, mlp_bias, dtype, device)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output and its residual, both [T, hidden_size]; `residual` is None at the first layer."""
        if residual is None:
            normed, residual = self.attention_norm(hidden), hidden
        else:
            normed, residual = self.attention_norm.add_and_norm(hidden, residual)
        attended = self.attention(self.qkv_proj(normed), positions, cos_sin, kv_cache, metadata)
        normed, residual = self.mlp_norm.add_and_norm(self.o_proj(attended), residual)
        return self.down_proj(self.activation(self.gate_up_proj(normed))), residual

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield from with_prefix("input_layernorm", self.attention_norm.weight_slots())
        yield from with_prefix("self_attn", self.qkv_proj.weight_slots())
        yield from with_prefix("self_attn", self.o_proj.weight_slots())
        yield from with_prefix("post_attention_layernorm", self.mlp_norm.weight_slots())
        yield from with_prefix("mlp", self.gate_up_proj.weight_slots())
        yield from with_prefix("mlp", self.down_proj.weight_slots())


class LlamaForCausalLM(nn.Module):
    """Token ids to hidden states, and hidden states to logits."""

    def __init__(
        self,
        config: LlamaConfig,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        """`num_positions` is the longest context that will be served."""
        super().__init__()
        self.config = config
        self.kv_shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim)
        sizes = (config.vocab_size, config.hidden_size)
        self.embedding = Embedding(*sizes, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(config, dtype, device) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        tied_weight = self.embedding.weight if config.tie_word_embeddings else None
        self.head = OutputHead(*sizes, tied_weight, dtype, device)
        self.cos_sin = rotary_table(config.rope, config.head_dim, num_positions, device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run the layers that `kv_cache` covers: all of them, or the first few when only their cost is of interest.

        Args:
            token_ids: int64 [T], every one below the vocabulary's size.
            positions: int64 [T], every one below `num_positions`.
            kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; written at the step's slots.
            metadata: where the tokens belong.

        Returns:
            [T, hidden_size], after the last norm.
        """
        hidden, residual = self.embedding(token_ids), None
        for layer, layer_cache in zip(self.layers, kv_cache.unbind(0), strict=False):
            hidden, residual = layer(hidden, residual, positions, self.cos_sin, layer_cache, metadata)
        return self.norm.add_and_norm(hidden, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden_size] -> fp32 [N, vocab_size]."""
        return self.head(hidden)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Yield a slot for every tensor that a checkpoint must have, and for no other."""
        yield from with_prefix("model.embed_tokens", self.embedding.weight_slots())
        for index, layer in enumerate(self.layers):
            yield from with_prefix(f"model.layers.{index}", layer.weight_slots())
        yield from with_prefix("model.norm", self.norm.weight_slots())
        yield from with_prefix("lm_head", self.head.weight_slots())
