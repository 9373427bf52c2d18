"""Llama models of a few thousand weights, made by transformers and saved as a user's directory would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.protocol.config import CacheConfig, Dtype, EngineConfig, ModelConfig, SchedulerConfig, WeightsFormat

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "rms_norm_eps": 1e-5,
}
MAX_MODEL_LEN = 200


def build(seed: int = 0, **options: Any) -> transformers.LlamaForCausalLM:
    """Return a random model in fp32; every parameter is random, also the norms and biases that are usually 1 or 0."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save(model: transformers.LlamaForCausalLM, directory: Path, max_shard_size: str = "1GB") -> Path:
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def engine_config(directory: Path, **model_options: Any) -> EngineConfig:
    """Return a configuration that serves the checkpoint in `directory` in fp32 from 64 blocks of 16 tokens."""
    options = {
        "path": str(directory),
        "weights_path": str(directory),
        "weights_format": WeightsFormat.SAFETENSORS,
        "served_model_names": ("tiny",),
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": SIZES["vocab_size"],
        "dtype": Dtype.FLOAT32,
        **model_options,
    }
    return EngineConfig(
        model=ModelConfig(**options),
        ipc_directory=str(directory),
        cache=CacheConfig(num_device_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64),
    )


@torch.no_grad()
def greedy(model: transformers.LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    """Return what the reference model says, computing everything anew for each token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
