"""GGUF files of tiny models, written by the `gguf` library as llama.cpp's converter would, and their index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import msgspec
import numpy as np
import torch
import transformers

from octavo.protocol.model_files import GGUF_INDEX_FILE, GgufIndex, GgufTensor

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows: row i of the first half of a head, then row i of the second."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def stored_weights(model: transformers.LlamaForCausalLM) -> dict[str, np.ndarray]:
    """Return the model's tensors under GGUF names, in llama.cpp's order."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    weights = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        part = name.split(".")[-2]
        weights[gguf_name(name)] = interleave(values, heads[part]) if part in heads else values
    return weights


def write(path: Path, weights: dict[str, np.ndarray], quantization: str | Callable[[str], str]) -> Path:
    """Write `weights`; matrices as `quantization` (or what it says for the name), everything else as F32."""
    quantization_of = (lambda name: quantization) if isinstance(quantization, str) else quantization
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in weights.items():
        wanted = quantization_of(name)
        quantization_type = gguf.GGMLQuantizationType[wanted]
        if values.ndim == 1 or wanted == "F32":
            writer.add_tensor(name, values.astype(np.float32))
        elif wanted == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, quantization_type), raw_dtype=quantization_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_index(path: Path, directory: Path) -> GgufIndex:
    """Write the index that the importer would leave."""
    tensors = tuple(
        GgufTensor(
            tensor.name,
            tensor.tensor_type.name,
            tuple(int(size) for size in reversed(tensor.shape)),
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in gguf.GGUFReader(path).tensors
    )
    index = GgufIndex(path.stat().st_size, tensors)
    save_index(index, directory)
    return index


def save_index(index: GgufIndex, directory: Path) -> None:
    (directory / GGUF_INDEX_FILE).write_bytes(msgspec.json.encode(index))


def dequantized(path: Path) -> dict[str, torch.Tensor]:
    """Return what the `gguf` library reads from the file."""
    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(path).tensors
    }
