"""The Llama family: pre-norm decoder layers of grouped-query attention and a gated feed-forward (Llama 2/3, SmolLM2).

A plain function of its arguments: token ids, positions, the KV cache and where the tokens belong in it. Between layers
travel the layer's output and the residual that it still has to be added to, so that each addition is part of the next
norm. The variants of the family (biases, tied head, rotary scaling, sizes) are data of the config.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from octavo.kernels.ops.attention import HeadShape
from octavo.kernels.ops.packed_linear import Activation
from octavo.worker.distributed import SINGLE_RANK, TensorParallelGroup
from octavo.worker.kv_cache import KvShape
from octavo.worker.layers.attention import AttentionMetadata, PagedAttention
from octavo.worker.layers.embedding import Embedding, OutputHead
from octavo.worker.layers.linear import ColumnParallelLinear, RowParallelLinear, Rows
from octavo.worker.layers.linear_weight import WeightFactory
from octavo.worker.layers.norm import RmsNorm
from octavo.worker.layers.rotary import rotary_table
from octavo.worker.layers.shares import HeadShare, rows_of_heads, split_heads, split_size
from octavo.worker.layers.weight_slot import WeightSlot
from octavo.worker.models.config import LlamaConfig


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind its norm."""

    def __init__(self, config: LlamaConfig, heads: HeadShare, make: WeightFactory, group: TensorParallelGroup) -> None:
        """`heads` are this rank's."""
        super().__init__()
        num_query_rows, num_kv_rows = (
            num_heads * config.head_dim for num_heads in (config.num_query_heads, config.num_kv_heads)
        )
        query_rows = rows_of_heads(heads.query_heads, config.head_dim)
        kv_rows = Rows(num_kv_rows, rows_of_heads(heads.kv_heads, config.head_dim))
        qkv = {"q_proj": Rows(num_query_rows, query_rows), "k_proj": kv_rows, "v_proj": kv_rows}
        num_neurons = config.intermediate_size
        neurons = split_size("intermediate_size", num_neurons, group.size)[group.rank]
        gate_up = dict.fromkeys(("gate_proj", "up_proj"), Rows(num_neurons, neurons))
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        attention_bias, mlp_bias = config.attention_bias, config.mlp_bias
        attn, mlp = make.inside("self_attn"), make.inside("mlp")

        self.attention_norm = RmsNorm(hidden_size, eps, make.inside("input_layernorm"))
        self.qkv_proj = ColumnParallelLinear(hidden_size, qkv, attention_bias, attn)
        self.attention = PagedAttention(len(heads.query_heads), len(heads.kv_heads), config.head_dim, make.device)
        self.o_proj = RowParallelLinear("o_proj", num_query_rows, query_rows, hidden_size, attention_bias, attn, group)
        self.mlp_norm = RmsNorm(hidden_size, eps, make.inside("post_attention_layernorm"))
        self.gate_up_proj = ColumnParallelLinear(hidden_size, gate_up, mlp_bias, mlp, Activation.SILU)
        self.down_proj = RowParallelLinear("down_proj", num_neurons, neurons, hidden_size, mlp_bias, mlp, group)

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
        return self.down_proj(self.gate_up_proj(normed)), residual

    def weight_slots(self) -> Iterator[WeightSlot]:
        for part in (
            *(self.attention_norm, self.qkv_proj, self.o_proj),
            *(self.mlp_norm, self.gate_up_proj, self.down_proj),
        ):
            yield from part.weight_slots()


class LlamaForCausalLM(nn.Module):
    """Token ids to hidden states, and hidden states to logits. Each rank of a group holds its share of every layer."""

    def __init__(
        self,
        config: LlamaConfig,
        num_positions: int,
        make: WeightFactory,
        group: TensorParallelGroup = SINGLE_RANK,
    ) -> None:
        """`num_positions` is the longest context that will be served.

        Raises StartupError(USAGE) when the model cannot be split over the ranks of `group`.
        """
        super().__init__()
        self.config = config
        self.group = group
        heads = split_heads(config.num_query_heads, config.num_kv_heads, group.size)[group.rank]
        self.heads = HeadShape(len(heads.query_heads), len(heads.kv_heads), config.head_dim)
        self.kv_shape = KvShape(config.num_layers, *self.heads[1:])
        sizes = (config.vocab_size, config.hidden_size)
        self.embedding = Embedding(*sizes, make.inside("model.embed_tokens"), group)
        self.layers = nn.ModuleList(
            DecoderLayer(config, heads, make.inside(f"model.layers.{index}"), group)
            for index in range(config.num_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, make.inside("model.norm"))
        tied_weight = self.embedding.weight if config.tie_word_embeddings else None
        self.head = OutputHead(*sizes, tied_weight, make.inside("lm_head"), group)
        self.cos_sin = rotary_table(config.rope, config.head_dim, num_positions, make.device)

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
            kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], of this rank's heads; written at
                the step's slots.
            metadata: where the tokens belong.

        Returns:
            [T, hidden_size], after the last norm.
        """
        hidden, residual = self.embedding(token_ids), None
        for layer, layer_cache in zip(self.layers, kv_cache.unbind(0), strict=False):
            hidden, residual = layer(hidden, residual, positions, self.cos_sin, layer_cache, metadata)
        return self.norm.add_and_norm(hidden, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[N, hidden_size] -> fp32 [N, vocab_size] on rank 0, None on the others; every rank has to call it."""
        return self.head(hidden)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Yield a slot for every tensor that a checkpoint must have, and for no other."""
        for part in (self.embedding, *self.layers, self.norm, self.head):
            yield from part.weight_slots()
