"""Writes the twin of a GGUF file: its weights de-quantised to bfloat16, as config.json, safetensors, tokenizer.json.

    python tests/bench/peer_twin.py MODEL.gguf DIRECTORY

transformers does it, so that the twin does not depend on our own reader.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def write_twin(gguf: Path, directory: Path) -> None:
    """Write the model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # it is no longer quantised
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)


if __name__ == "__main__":
    write_twin(Path(sys.argv[1]), Path(sys.argv[2]))
