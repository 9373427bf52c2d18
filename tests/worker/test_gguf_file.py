"""GGUF: the model is the one that was written, up to what its quantisation loses; broken files are named."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import tiny_gguf
import tiny_llama
import torch

from octavo.protocol.config import WeightsFormat
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.gguf_file import hugging_face_name, separate_halves
from octavo.worker.models.config import read_config
from octavo.worker.weight_loader import load_model

SIZES = {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 6, "num_key_value_heads": 2}
FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"]


def save(directory, quantization="F32", **options):
    """Write a model as GGUF with config.json and index beside it; return the reference, the config, the index."""
    reference = tiny_llama.build(**{**SIZES, **options})
    reference.config.architectures = ["LlamaForCausalLM"]
    reference.config.save_pretrained(directory)
    path = tiny_gguf.write(directory / "model.gguf", tiny_gguf.stored_weights(reference), quantization)
    index = tiny_gguf.write_index(path, directory)
    config = tiny_llama.engine_config(directory, weights_path=str(path), weights_format=WeightsFormat.GGUF)
    return reference, config.model, index


def load(config, dtype=torch.float32):
    return load_model(config, read_config(config.path), dtype, torch.device("cpu"))


def expected_parameters(path, num_heads: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
    """What the library reads, with query and key rows back in the order of Hugging Face."""
    weights = tiny_gguf.dequantized(path)
    for name, rows in weights.items():
        for part, heads in (("attn_q.", num_heads), ("attn_k.", num_kv_heads)):
            if part in name:
                halves = rows.view(heads, -1, 2, *rows.shape[1:])
                weights[name] = torch.cat((halves[:, :, 0], halves[:, :, 1]), dim=1).view(rows.shape)
    return weights


@pytest.mark.parametrize("quantization", FORMATS)
def test_weights_are_what_the_library_reads(tmp_path, quantization):
    _, config, _ = save(tmp_path, quantization)
    model = load(config)
    expected = expected_parameters(tmp_path / "model.gguf", 6, 2)
    for index, layer in enumerate(model.layers):
        fused = {
            "attn_q attn_k attn_v": layer.qkv_proj.weight.tensor,
            "attn_output": layer.o_proj.weight.tensor,
            "ffn_gate ffn_up": layer.gate_up_proj.weight.tensor,
            "ffn_down": layer.down_proj.weight.tensor,
            "attn_norm": layer.attention_norm.weight,
            "ffn_norm": layer.mlp_norm.weight,
        }
        for parts, weight in fused.items():
            stacked = torch.cat([expected[f"blk.{index}.{part}.weight"] for part in parts.split()])
            assert torch.equal(weight, stacked), parts
    assert torch.equal(model.embedding.weight.tensor, expected["token_embd.weight"])
    assert torch.equal(model.norm.weight, expected["output_norm.weight"])
    assert torch.equal(model.head.weight.tensor, expected["output.weight"])


@pytest.mark.parametrize("options", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_every_parameter_finds_its_place(tmp_path, options):
    """An F32 file holds what a safetensors file holds, so the two models are equal bit for bit."""
    reference, config, _ = save(tmp_path, **options)
    tiny_llama.save(reference, tmp_path / "safetensors")
    twin = load(tiny_llama.engine_config(tmp_path / "safetensors").model)
    model = load(config)
    assert len(list(model.parameters())) == len(list(twin.parameters()))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("quantization", ["F32", "Q4_1"])
def test_loading_in_bfloat16_rounds_once(tmp_path, quantization):
    _, config, _ = save(tmp_path, quantization)
    for wide, narrow in zip(load(config).parameters(), load(config, torch.bfloat16).parameters(), strict=True):
        assert torch.equal(wide.to(torch.bfloat16), narrow)


def test_halves_are_set_apart():
    rows = np.arange(24, dtype=np.float32).reshape(12, 2)
    interleaved = torch.from_numpy(tiny_gguf.interleave(rows, num_heads=3))
    assert not np.array_equal(interleaved.numpy(), rows)
    assert np.array_equal(separate_halves(interleaved, 3).numpy(), rows)


def test_a_name_without_counterpart_stays():
    for name in ("blk.0.ffn_gate_exps.weight", "blk.x.attn_q.weight", "rope_freqs.weight", "blk.0.attn_q.scale"):
        assert hugging_face_name(name) == name


def refusal(config) -> str:
    with pytest.raises(StartupError) as caught:
        load(config)
    assert caught.value.exit_code is ExitCode.BAD_WEIGHTS
    assert "\n" not in caught.value.message
    return caught.value.message


def change_tensor(index, old_name, **changes):
    tensors = [
        msgspec.structs.replace(tensor, **changes) if tensor.name == old_name else tensor for tensor in index.tensors
    ]
    return msgspec.structs.replace(index, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_bytes": 8}, "needs 36864 bytes, the index gives 8"),
        ({"offset_bytes": 2**40}, "it is truncated"),
        ({"offset_bytes": -4}, "it is truncated"),
        ({"offset_bytes": 6}, "is not aligned"),
        ({"quantization": "Q4_0"}, "needs 5184 bytes"),
        ({"quantization": "Q99"}, "has type Q99, which is not supported"),
        ({"quantization": "I32"}, "has type I32, which is not supported"),
        ({"quantization": "Q4_1", "shape": (96, 95)}, "are not whole blocks of Q4_1"),
        ({"shape": (96, 48), "num_bytes": 18432}, "has shape [96, 48], config.json asks for [96, 96]"),
        ({"name": "blk.9.attn_q.weight"}, "tensor model.layers.0.self_attn.q_proj.weight [96, 96] is missing"),
        ({"name": "mystery"}, "tensor model.layers.0.self_attn.q_proj.weight [96, 96] is missing"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path, changes, words):
    _, config, index = save(tmp_path)
    tiny_gguf.save_index(change_tensor(index, "blk.0.attn_q.weight", **changes), tmp_path)
    message = refusal(config)
    assert words in message
    assert "model.gguf" in message


def test_a_truncated_file_names_the_tensor(tmp_path):
    _, config, _ = save(tmp_path)
    path = tmp_path / "model.gguf"
    path.write_bytes(path.read_bytes()[:-5000])
    assert "model.gguf: tensor " in refusal(config)
    assert "truncated" in refusal(config)


def test_a_file_that_changed_since_its_import_is_refused(tmp_path):
    _, config, _ = save(tmp_path)
    with (tmp_path / "model.gguf").open("ab") as file:
        file.write(bytes(32))
    assert "when it was imported" in refusal(config)


def test_a_tensor_that_the_model_does_not_have_is_refused(tmp_path):
    _, config, index = save(tmp_path)
    extra = msgspec.structs.replace(index.tensors[-1], name="blk.0.attn_q.bias")
    tiny_gguf.save_index(msgspec.structs.replace(index, tensors=(*index.tensors, extra)), tmp_path)
    assert "tensor blk.0.attn_q.bias is not part of the model" in refusal(config)


def test_rope_factors_need_their_options(tmp_path):
    """The factors of Llama 3's scaling are a tensor in GGUF; config.json must say the same, or positions are wrong."""
    _, config, index = save(tmp_path)
    factors = msgspec.structs.replace(index.tensors[-1], name="rope_freqs.weight")
    tiny_gguf.save_index(msgspec.structs.replace(index, tensors=(*index.tensors, factors)), tmp_path)
    assert "rope_freqs.weight scales the rotary frequencies" in refusal(config)
    values = json.loads((tmp_path / "config.json").read_text())
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    values["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 1e4, **llama3}
    (tmp_path / "config.json").write_text(json.dumps(values))
    load(config)


@pytest.mark.parametrize("name", ["gguf_index.json", "model.gguf"])
def test_a_missing_file_is_named(tmp_path, name):
    _, config, _ = save(tmp_path)
    (tmp_path / name).unlink()
    assert name in refusal(config)


@pytest.mark.parametrize("data", [b"", b"{", b'{"file_num_bytes": 3}'])
def test_a_broken_index_is_named(tmp_path, data):
    _, config, _ = save(tmp_path)
    (tmp_path / "gguf_index.json").write_bytes(data)
    assert "gguf_index.json" in refusal(config)
