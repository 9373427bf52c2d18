"""The files that the model importer leaves for the worker.

A GGUF file says everything about a model in its own way. It is read once: its metadata is written as the files of a
Hugging Face directory (config.json, tokenizer.json, chat template, generation_config.json) plus the index defined
here, and its weights stay where they are. So only the importer knows GGUF metadata, and no start pays for parsing it.
"""

from __future__ import annotations

import msgspec

GGUF_INDEX_FILE = "gguf_index.json"


class GgufTensor(msgspec.Struct, frozen=True):
    """Where one tensor lies in the GGUF file.

    Attributes:
        name: GGUF name, such as `blk.0.attn_q.weight`.
        quantization: name of gguf.GGMLQuantizationType, such as `Q4_1`.
        shape: elements per dimension in row-major order, as torch has it (GGUF itself lists them reversed).
        offset_bytes: from the start of the file.
        num_bytes: size of the stored blocks.
    """

    name: str
    quantization: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int


class GgufIndex(msgspec.Struct, frozen=True):
    """All tensors of the file, and the size of the file that they were read from."""

    file_num_bytes: int
    tensors: tuple[GgufTensor, ...]
