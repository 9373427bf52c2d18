"""Weights from a GGUF file, by the index that the importer left beside config.json.

The index says where each tensor lies, so the file itself is only mapped. Two things differ from a Hugging Face
checkpoint: the names, and the order of the query and key rows. llama.cpp rotates neighbouring pairs of a head where
Hugging Face rotates the two halves, so the converter to GGUF interleaves the halves; here they are set apart again.
That only moves whole rows, so it is done to blocks as they are.
"""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path

import msgspec
import torch

from octavo.kernels.ops.packed_linear import BLOCK_BYTES, WeightFormat
from octavo.protocol.model_files import GGUF_INDEX_FILE, GgufIndex, GgufTensor
from octavo.worker.dequantize import PLAIN_DTYPES, block_layout, dequantize
from octavo.worker.models.config import LlamaConfig
from octavo.worker.models.rope_config import RopeType
from octavo.worker.stored_tensor import StoredTensor, bad_weights, map_file, select_rows

ALIGNMENT_BYTES = 4  # of the widest element; the format itself asks for at least 8
ROPE_FACTORS = "rope_freqs.weight"
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
INTERLEAVED = ("attn_q", "attn_k")
LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
MODEL_PATTERN = re.compile(r"(\w+)\.(weight|bias)")


def hugging_face_name(gguf_name: str) -> str:
    """Return the name that the model's layers know; a name without counterpart is returned as it is."""
    if (match := LAYER_PATTERN.fullmatch(gguf_name)) and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    if (match := MODEL_PATTERN.fullmatch(gguf_name)) and match[1] in MODEL_NAMES:
        return f"{MODEL_NAMES[match[1]]}.{match[2]}"
    return gguf_name


def separate_halves(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the interleaving: within each head, rows 0, 2, 4, ... come first, then 1, 3, 5, ...; [rows, ...]."""
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _read(
    data: torch.Tensor, tensor: GgufTensor, interleaved_head_dim: int | None, rows: range | None = None
) -> torch.Tensor:
    if len(tensor.shape) == 1 and tensor.quantization not in PLAIN_DTYPES:  # its blocks span rows
        weights = dequantize(data, tensor.quantization, tensor.shape)
        weights = weights if rows is None else weights[rows.start : rows.stop]
    else:
        part, shape = select_rows(data, tensor.shape, rows)
        weights = dequantize(part, tensor.quantization, shape)
    return weights if interleaved_head_dim is None else separate_halves(weights, len(weights) // interleaved_head_dim)


def _read_blocks(
    data: torch.Tensor, tensor: GgufTensor, head_dim: int | None, rows: range | None = None
) -> torch.Tensor:
    part, shape = select_rows(data, tensor.shape, rows)
    blocks = part.view(shape[0], -1)
    return blocks if head_dim is None else separate_halves(blocks, len(blocks) // head_dim)


def _block_format(tensor: GgufTensor) -> WeightFormat | None:
    """Return the format of a matrix that kernels multiply as it is."""
    known = {str(blocks): blocks for blocks in BLOCK_BYTES}
    return known.get(tensor.quantization) if len(tensor.shape) == 2 else None


def _check(tensor: GgufTensor, origin: str, file_num_bytes: int) -> None:
    layout = block_layout(tensor.quantization)
    if layout is None:
        raise bad_weights(f"{origin} has type {tensor.quantization}, which is not supported")
    if not tensor.shape or tensor.shape[-1] % layout.num_weights:
        raise bad_weights(f"{origin}: rows of {list(tensor.shape)} are not whole blocks of {tensor.quantization}")
    if tensor.offset_bytes % ALIGNMENT_BYTES:
        raise bad_weights(f"{origin} begins at byte {tensor.offset_bytes}, which is not aligned")
    num_bytes = math.prod(tensor.shape) // layout.num_weights * layout.num_bytes
    if tensor.num_bytes != num_bytes:
        raise bad_weights(
            f"{origin} of {tensor.quantization} {list(tensor.shape)} needs {num_bytes} bytes, "
            f"the index gives {tensor.num_bytes}"
        )
    if tensor.offset_bytes < 0 or tensor.offset_bytes + tensor.num_bytes > file_num_bytes:
        raise bad_weights(
            f"{origin} ends at byte {tensor.offset_bytes + tensor.num_bytes}, the file has {file_num_bytes}: "
            f"it is truncated"
        )


def _read_index(directory: str) -> GgufIndex:
    path = Path(directory) / GGUF_INDEX_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=GgufIndex)
    except OSError as problem:
        raise bad_weights(f"{path}: {problem.strerror}") from problem
    except ValueError as problem:
        raise bad_weights(f"{path}: {problem}") from problem


def open_gguf(index_directory: str, gguf_path: str, config: LlamaConfig) -> dict[str, StoredTensor]:
    """Return the tensors of `gguf_path` by their Hugging Face names, checked against the index and the file's size.

    Raises StartupError(BAD_WEIGHTS) naming the file and, where there is one, the tensor.
    """
    index, path = _read_index(index_directory), Path(gguf_path)
    mapped = map_file(path)
    tensors: dict[str, StoredTensor] = {}
    for tensor in index.tensors:
        origin = f"{path}: tensor {tensor.name}"
        if tensor.name == ROPE_FACTORS:
            _check_rope_factors(config, origin)
            continue
        _check(tensor, origin, len(mapped))
        name = hugging_face_name(tensor.name)
        match = LAYER_PATTERN.fullmatch(tensor.name)
        head_dim = config.head_dim if match and match[2] in INTERLEAVED else None
        data = mapped[tensor.offset_bytes : tensor.offset_bytes + tensor.num_bytes]
        dtype = PLAIN_DTYPES.get(tensor.quantization, torch.float32)
        read, read_blocks = (partial(each, data, tensor, head_dim) for each in (_read, _read_blocks))
        blocks = _block_format(tensor)
        tensors[name] = StoredTensor(
            *(name, tensor.shape, dtype, origin, read, blocks),
            read_blocks=None if blocks is None else read_blocks,
            row_multiple=head_dim or 1,
        )
    if len(mapped) != index.file_num_bytes:
        raise bad_weights(f"{path} has {len(mapped)} bytes, it had {index.file_num_bytes} when it was imported")
    return tensors


def _check_rope_factors(config: LlamaConfig, origin: str) -> None:
    """The tensor is the result of Llama 3's scaling; without its options in config.json every position is wrong."""
    if config.rope.rope_type is not RopeType.LLAMA3:
        raise bad_weights(
            f"{origin} scales the rotary frequencies, but config.json has rope type {config.rope.rope_type}"
        )
