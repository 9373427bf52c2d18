"""Writes GGUF files of a few kilobytes: a Llama of one layer with a small vocabulary, and changed on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN = 32
VOCABULARY = ["<|a|>", "<|b|>", "<|im_end|>", *(chr(c) for c in range(ord("a"), ord("z") + 1)), "Ġ", "he", "ll", "hell"]
MERGES = ["h e", "l l", "he ll"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


def metadata(**changes: Any) -> dict[str, Any]:
    """Return the entries of a complete file; `changes` replaces or, with None, removes some (`.` written as `__`)."""
    entries: dict[str, Any] = {
        "llama.context_length": np.uint32(128),
        "llama.embedding_length": np.uint32(HIDDEN),
        "llama.block_count": np.uint32(1),
        "llama.feed_forward_length": np.uint32(64),
        "llama.attention.head_count": np.uint32(4),
        "llama.attention.head_count_kv": np.uint32(2),
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(VOCABULARY) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": np.uint32(1),
        "tokenizer.ggml.eos_token_id": np.uint32(0),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    entries.update({name.replace("__", "."): value for name, value in changes.items()})
    return {name: value for name, value in entries.items() if value is not None}


def write(
    path: Path,
    architecture: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    vocab_size: int = len(VOCABULARY),
    **changes: Any,
) -> Path:
    """Write the file with a token embedding and `tensors`."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata(**changes).items():
        _add(writer, name, value)
    embedding = np.arange(vocab_size * HIDDEN, dtype=np.float32).reshape(vocab_size, HIDDEN)
    for name, data in {"token_embd.weight": embedding, **(tensors or {})}.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, np.floating):
        writer.add_float32(name, float(value))
    else:
        writer.add_uint32(name, int(value))
