"""GGUF files become Hugging Face directories: the same facts, the same tokens, and broken files are refused by name."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import struct
from pathlib import Path

import gguf
import gguf_variants
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from octavo.api_server.gguf_header import read_gguf_header
from octavo.api_server.gguf_import import import_gguf
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.protocol.model_files import GGUF_INDEX_FILE, GgufIndex

TEXTS = [
    "Hello world",
    "a  b\n\n\nc",
    "in 1969, 12 345.",
    "\n\n1. first\n\n2. second",
    "  99",
    "<|im_start|>user\nhi<|im_end|>",
    "ünïcode 漢字 🙂 é",
    "Don't you'll",
    "tab\t\tx  ",
]


def imported(path: Path, target: Path) -> Path:
    target.mkdir()
    return Path(import_gguf(str(path), str(target)))


def read(directory: Path, name: str) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((directory / name).read_text())
    return loaded


def refusal(path: Path, tmp_path: Path) -> StartupError:
    with pytest.raises(StartupError) as caught:
        imported(path, tmp_path / "out")
    assert str(path) in caught.value.message
    return caught.value


def test_the_facts_of_a_file_become_config_json(tmp_path: Path) -> None:
    out = imported(gguf_variants.write(tmp_path / "m.gguf"), tmp_path / "out")
    config = read(out, "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["num_key_value_heads"], config["head_dim"]) == (32, 2, 8)
    assert config["vocab_size"] == len(gguf_variants.VOCABULARY)
    assert config["tie_word_embeddings"] is True
    assert config["rope_theta"] == 10_000.0
    assert "rope_scaling" not in config


def test_the_turn_end_of_the_template_is_an_eos_as_well(tmp_path: Path) -> None:
    out = imported(gguf_variants.write(tmp_path / "m.gguf"), tmp_path / "out")
    assert read(out, "generation_config.json")["eos_token_id"] == [0, 2]
    assert read(out, "tokenizer_config.json")["eos_token"] == "<|a|>"
    assert read(out, "tokenizer_config.json")["chat_template"] == gguf_variants.CHAT_TEMPLATE


def test_untied_and_biased_models_are_told_by_their_tensors(tmp_path: Path) -> None:
    tensors = {
        name: np.zeros(32, dtype=np.float32) for name in ("output.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate.bias")
    }
    out = imported(gguf_variants.write(tmp_path / "m.gguf", tensors=tensors), tmp_path / "out")
    config = read(out, "config.json")
    assert (config["tie_word_embeddings"], config["attention_bias"], config["mlp_bias"]) == (False, True, True)


def test_the_vocabulary_size_is_that_of_the_logits(tmp_path: Path) -> None:
    out = imported(gguf_variants.write(tmp_path / "m.gguf", vocab_size=64), tmp_path / "out")
    assert read(out, "config.json")["vocab_size"] == 64


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    theta, pairs, factor = 500_000.0, 64, 32.0
    waves = [2 * math.pi * theta ** (pair / pairs) for pair in range(pairs)]
    smooth = [min(1.0, max(0.0, (8192 / wave - 1) / 3)) for wave in waves]
    factors = np.array([1 / ((1 - s) / factor + s) for s in smooth], dtype=np.float32)
    assert 1 < np.median(factors[(factors > 1) & (factors < factor)]) < factor  # the ramp between the ends is there
    entries = {"llama__rope__freq_base": np.float32(theta)}
    path = gguf_variants.write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors}, **entries)
    scaling = read(imported(path, tmp_path / "out"), "config.json")["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_rope_scaling(tmp_path: Path) -> None:
    entries = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": np.float32(4)}
    out = imported(gguf_variants.write(tmp_path / "m.gguf", **entries), tmp_path / "out")
    assert read(out, "config.json")["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("qwen2", {}, "qwen2"),
        ("llama", {"llama__expert_count": np.uint32(8)}, "experts"),
        ("llama", {"split__count": np.uint32(3)}, "3 parts"),
        ("llama", {"llama__rope__scaling__type": "longrope"}, "longrope"),
        ("llama", {"tokenizer__ggml__model": "bert"}, "bert"),
        ("llama", {"tokenizer__ggml__pre": "unheard-of"}, "unheard-of"),
        ("llama", {"llama__attention__head_count_kv": [1, 2]}, "num_key_value_heads"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, architecture: str, changes: dict[str, object], named: str
) -> None:
    path = gguf_variants.write(tmp_path / "m.gguf", architecture, **changes)
    problem = refusal(path, tmp_path)
    assert problem.exit_code is ExitCode.UNSUPPORTED_MODEL
    assert named in problem.message


def test_rope_factors_without_a_rule_are_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.linspace(1, 3, 4, dtype=np.float32)}
    problem = refusal(gguf_variants.write(tmp_path / "m.gguf", tensors=factors), tmp_path)
    assert problem.exit_code is ExitCode.UNSUPPORTED_MODEL


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__context_length": None},
        {"tokenizer__ggml__tokens": None},
        {"tokenizer__ggml__eos_token_id": np.uint32(99_999)},
        {"tokenizer__ggml__merges": ["nothere x"]},
        {"llama__embedding_length": "many"},
    ],
)
def test_incomplete_metadata_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    problem = refusal(gguf_variants.write(tmp_path / "m.gguf", **changes), tmp_path)
    assert problem.exit_code is ExitCode.BAD_WEIGHTS


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 10, 30, 200, 700, -1, -3000])
def test_a_truncated_file_is_refused(tmp_path: Path, num_bytes: int) -> None:
    path = gguf_variants.write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert refusal(path, tmp_path).exit_code is ExitCode.BAD_WEIGHTS


def test_a_cut_off_tensor_is_named(tmp_path: Path) -> None:
    path = gguf_variants.write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-32])
    assert "token_embd.weight" in refusal(path, tmp_path).message


@pytest.mark.parametrize(
    "forged",
    [
        b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(64),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 0, 2**60) + bytes(64),
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
        b"PK\x03\x04" + bytes(64),
    ],
)
def test_a_forged_header_costs_nothing(tmp_path: Path, forged: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(forged)
    assert refusal(path, tmp_path).exit_code is ExitCode.BAD_WEIGHTS


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_harmless(tmp_path: Path, position: float, value: int) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "out"
    if not path.exists():
        gguf_variants.write(path)
        shutil.copy(path, tmp_path / "whole")
    data = bytearray((tmp_path / "whole").read_bytes())
    data[int(position * (len(data) - 4 * 33 * 32))] = value  # the tensor's own bytes are not read here
    path.write_bytes(data)
    out.mkdir(exist_ok=True)
    with contextlib.suppress(StartupError):  # anything else fails the test
        import_gguf(str(path), str(out))


def test_byte_level_text_is_cut_by_the_rule_that_the_file_names(tmp_path: Path) -> None:
    out = imported(gguf_variants.write(tmp_path / "m.gguf"), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("hello hell<|im_end|>").tokens == ["hell", "o", "Ġ", "hell", "<|im_end|>"]
    assert tokenizer.decode(tokenizer.encode("hello hell").ids) == "hello hell"


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    path = gguf_variants.write(tmp_path / "m.gguf", tokenizer__ggml__add_bos_token=True)
    tokenizer = Tokenizer.from_file(str(imported(path, tmp_path / "out") / "tokenizer.json"))
    assert tokenizer.encode("he").tokens == ["<|b|>", "he"]
    assert tokenizer.encode("he", add_special_tokens=False).tokens == ["he"]


def test_sentencepiece_vocabularies(tmp_path: Path) -> None:
    space = "\u2581"
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [space, "h", "e", "l", "o", "he", "ll", f"{space}he", "llo", f"{space}hello", "lo"]
    scores = [0.0] * len(pieces) + [-10.0, -11.0, -12.0, -13.0, -14.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    path = gguf_variants.write(
        tmp_path / "m.gguf",
        vocab_size=len(pieces) + len(words),
        tokenizer__ggml__model="llama",
        tokenizer__ggml__pre=None,
        tokenizer__ggml__merges=None,
        tokenizer__ggml__tokens=[*pieces, *words],
        tokenizer__ggml__token_type=[2, 3, 3] + [6] * 256 + [1] * len(words),
        tokenizer__ggml__scores=scores,
        tokenizer__ggml__eos_token_id=np.uint32(2),
    )
    out = imported(path, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["<s>", f"{space}hello"]
    assert tokenizer.encode("loé</s>", add_special_tokens=False).tokens == [space, "lo", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("hello loé").ids) == "hello loé"
    assert read(out, "tokenizer_config.json")["add_bos_token"] is True


@pytest.mark.model
def test_the_default_model_reads_as_the_gguf_library_reads_it(smollm2_gguf: Path) -> None:
    ours = read_gguf_header(smollm2_gguf)
    theirs = gguf.GGUFReader(smollm2_gguf)
    assert [(t.name, t.quantization, t.shape, t.offset_bytes, t.num_bytes) for t in ours.tensors] == [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist()[::-1]), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key


@pytest.mark.model
def test_the_index_of_the_default_model_lies_beside_its_config(smollm2_gguf: Path, smollm2_directory: Path) -> None:
    index = msgspec.json.decode((smollm2_directory / GGUF_INDEX_FILE).read_bytes(), type=GgufIndex)
    assert index.file_num_bytes == smollm2_gguf.stat().st_size
    assert index.tensors == read_gguf_header(smollm2_gguf).tensors


@pytest.mark.model
def test_the_default_model_tokenizes_like_transformers(smollm2_gguf: Path, tmp_path: Path) -> None:
    """transformers does not know the file's rule for digits, so its own splitting is put right before comparing."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    split = reference.backend_tokenizer.pre_tokenizer
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), split])
    ours = AutoTokenizer.from_pretrained(imported(smollm2_gguf, tmp_path / "out"))
    rng = random.Random(7)
    alphabet = "abc XYZ 0123 \n\t.,;:!?'\"()éß漢🙂<|>"
    texts = [*TEXTS, *("".join(rng.choices(alphabet, k=40)) for _ in range(200))]
    for text in texts:
        assert ours.encode(text) == reference.encode(text)
        assert ours.decode(ours.encode(text)) == text
    messages = [{"role": "user", "content": "What is 2+2?"}]
    rendered = [
        each.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for each in (ours, reference)
    ]
    assert rendered[0] == rendered[1]
    assert (ours.eos_token_id, ours.bos_token_id) == (reference.eos_token_id, reference.bos_token_id) == (2, 1)
