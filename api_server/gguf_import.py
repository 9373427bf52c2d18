"""Helper process: writes what a GGUF file says about its model as the files of a Hugging Face directory.

After it nobody parses GGUF metadata again: config.json, generation_config.json and the tokenizer files say all about
the model, and the index says where each tensor lies in the file, which stays where it is.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec

from octavo.api_server.gguf_header import GgufHeader, read_gguf_header
from octavo.api_server.gguf_tokenizer import CONTROL, adds_bos, build_tokenizer, token_text
from octavo.api_server.helper_process import run_helper
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.protocol.model_files import GGUF_INDEX_FILE, GgufIndex

Json = dict[str, Any]

ARCHITECTURES = {"llama": "LlamaForCausalLM"}
# Tokens that end a turn in the templates of chat models; a file often names only the EOS of the base model.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_turn|>", "<|end|>")
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
ROPE_FACTORS_TENSOR = "rope_freqs.weight"


def import_gguf(gguf_file: str, target_directory: str) -> str:
    """Write the files that describe `gguf_file` into `target_directory`; raises StartupError naming the file."""
    path, target = Path(gguf_file), Path(target_directory)
    header = read_gguf_header(path)
    try:
        _check_supported(header)
        config = model_config(path, header)
        tokenizer = build_tokenizer(header.metadata)
        texts = {
            "config.json": config,
            "generation_config.json": generation_config(header.metadata),
            "tokenizer_config.json": tokenizer_config(header.metadata),
            GGUF_INDEX_FILE: GgufIndex(header.file_num_bytes, header.tensors),
        }
    except StartupError as problem:
        raise StartupError(problem.exit_code, f"{path}: {problem.message}") from problem
    except (KeyError, TypeError, AttributeError) as problem:
        raise StartupError(ExitCode.BAD_WEIGHTS, f"{path}: its metadata is not complete: {problem}") from problem
    except Exception as problem:
        raise StartupError(ExitCode.BAD_WEIGHTS, f"{path}: its vocabulary cannot be used: {problem}") from problem
    for name, content in texts.items():
        (target / name).write_bytes(msgspec.json.encode(content))
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    return str(target)


def _check_supported(header: GgufHeader) -> None:
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise _unsupported(f"the architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    if header.metadata.get(f"{architecture}.expert_count", 0):
        raise _unsupported("a mixture of experts is not supported yet")
    num_parts = header.metadata.get("split.count", 1)
    if num_parts > 1:
        raise _unsupported(f"it is one of {num_parts} parts; merge them first (llama-gguf-split --merge)")


def model_config(path: Path, header: GgufHeader) -> Json:
    """Return config.json of the model."""
    metadata, architecture = header.metadata, header.metadata["general.architecture"]
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    num_heads = metadata["llama.attention.head_count"]
    hidden_size = metadata["llama.embedding_length"]
    head_dim = metadata.get("llama.attention.key_length") or metadata.get("llama.rope.dimension_count")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim or hidden_size // num_heads,
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": shapes["token_embd.weight"][0],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata.get("llama.rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    for field in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if not isinstance(config[field], int):
            raise _unsupported(f"its layers differ in {field}")
    scaling = _rope_scaling(path, header, config)
    return config if scaling is None else {**config, "rope_scaling": scaling}


def _rope_scaling(path: Path, header: GgufHeader, config: Json) -> Json | None:
    metadata = header.metadata
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": metadata["llama.rope.scaling.factor"]}
        original = metadata.get("llama.rope.scaling.original_context_length")
        return scaling if original is None else {**scaling, "original_max_position_embeddings": original}
    if kind != "none":
        raise _unsupported(f"its RoPE scaling {kind!r} is not known")
    factors = _read_rope_factors(path, header)
    return None if factors is None else _llama3_scaling(factors, config["rope_theta"])


def _read_rope_factors(path: Path, header: GgufHeader) -> tuple[float, ...] | None:
    tensor = next((each for each in header.tensors if each.name == ROPE_FACTORS_TENSOR), None)
    if tensor is None:
        return None
    if tensor.quantization != "F32":
        raise _unsupported(f"{ROPE_FACTORS_TENSOR} is {tensor.quantization}, not F32")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        end = tensor.offset_bytes + tensor.num_bytes
        return struct.unpack(f"<{tensor.num_bytes // 4}f", data[tensor.offset_bytes : end])


def _llama3_scaling(factors: tuple[float, ...], theta: float) -> Json:
    """Find the Llama 3 scaling of which `factors`, one per pair of a head's dimensions, are the result.

    The file holds only the result. All published models share the constants but `factor`, which the longest wave
    shows; recomputing every factor proves the guess.
    """
    factor = round(max(factors), 4)
    low, high, original = LLAMA3_ROPE.values()
    for pair, found in enumerate(factors):
        wave_length = 2 * math.pi * theta ** (pair / len(factors))
        smooth = min(1.0, max(0.0, (original / wave_length - low) / (high - low)))
        if not math.isclose(found, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            raise _unsupported(f"{ROPE_FACTORS_TENSOR} does not follow the Llama 3 rule")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def generation_config(metadata: Json) -> Json:
    """Return generation_config.json: the ids that end an answer."""
    ids = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    template = metadata.get("tokenizer.chat_template", "")
    typed = zip(metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ()), strict=False)
    ends = {i for i, (text, kind) in enumerate(typed) if kind == CONTROL and text in TURN_ENDS and text in template}
    return {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": sorted(ids | ends)}


def tokenizer_config(metadata: Json) -> Json:
    """Return tokenizer_config.json: special tokens by role, and the chat template."""
    config: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": adds_bos(metadata)}
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for gguf_role, role in roles.items():
        token_id = metadata.get(f"tokenizer.ggml.{gguf_role}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = token_text(metadata, token_id)
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _unsupported(reason: str) -> StartupError:
    return StartupError(ExitCode.UNSUPPORTED_MODEL, reason)


if __name__ == "__main__":
    run_helper(import_gguf)
