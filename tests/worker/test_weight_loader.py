"""What the model wants against what the checkpoint has."""

from __future__ import annotations

import json

import pytest
import tiny_llama
import torch
from safetensors.torch import load_file, save_file

from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker import device, weight_loader
from octavo.worker.models.config import read_config
from octavo.worker.safetensors_files import SINGLE_FILE
from octavo.worker.weight_loader import load_model, weights_num_bytes

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path):
    return tiny_llama.save(tiny_llama.build(), tmp_path)


def load(directory, dtype=torch.float32):
    config = tiny_llama.engine_config(directory).model
    return load_model(config, read_config(config.path), dtype, CPU)


def change(directory, edit) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, directory / SINGLE_FILE)


def change_config(directory, **values) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refusal(directory) -> str:
    with pytest.raises(StartupError) as caught:
        load(directory)
    assert caught.value.exit_code is ExitCode.BAD_WEIGHTS
    return caught.value.message


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(checkpoint, name):
    change(checkpoint, lambda tensors: tensors.pop(name))
    assert f"tensor {name} [" in refusal(checkpoint)
    assert "is missing" in refusal(checkpoint)


def test_a_wrong_shape_is_named_with_both_shapes(checkpoint):
    change(checkpoint, lambda tensors: tensors.update({Q_PROJ: torch.zeros(48, 32)}))
    message = refusal(checkpoint)
    assert f"{SINGLE_FILE}: tensor {Q_PROJ} has shape [48, 32], config.json asks for [48, 48]" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_we_cannot_read_is_named(checkpoint, dtype):
    change(checkpoint, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(dtype)}))
    assert f"tensor {Q_PROJ} has dtype {dtype}" in refusal(checkpoint)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "x"])
def test_a_tensor_too_many_is_named(checkpoint, name):
    change(checkpoint, lambda tensors: tensors.update({name: torch.zeros(48)}))
    assert f"tensor {name} is not part of the model" in refusal(checkpoint)


@pytest.mark.parametrize(
    "values", [{"num_hidden_layers": 2}, {"num_hidden_layers": 4}, {"attention_bias": True}, {"vocab_size": 161}]
)
def test_a_config_of_another_model_is_refused(checkpoint, values):
    change_config(checkpoint, **values)
    refusal(checkpoint)


def test_stored_rotary_buffers_are_ignored(checkpoint):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(checkpoint, lambda tensors: tensors.update({name: torch.zeros(4)}))
    load(checkpoint)


def test_a_tied_head_is_one_tensor_even_when_it_is_stored_twice(tmp_path):
    directory = tiny_llama.save(tiny_llama.build(tie_word_embeddings=True), tmp_path)
    change(directory, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(160, 48)}))
    model = load(directory)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.tensor.abs().sum() > 0
    untied = sum(parameter.numel() for parameter in tiny_llama.build().parameters())
    assert weights_num_bytes(model) == 4 * (untied - 160 * 48)


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_float_dtype_is_converted(checkpoint, stored, dtype):
    expected = load_file(checkpoint / SINGLE_FILE)[Q_PROJ].to(stored).to(dtype)
    change(checkpoint, lambda tensors: tensors.update({name: t.to(stored) for name, t in tensors.items()}))
    model = load(checkpoint, dtype)
    assert torch.equal(model.layers[1].qkv_proj.weight.tensor[:48], expected)


def test_too_little_memory_is_found_before_it_is_taken(checkpoint, monkeypatch):
    monkeypatch.setattr(device, "free_memory_bytes", lambda: 1000)
    monkeypatch.setattr(weight_loader, "build_model", build_on_meta_only(weight_loader.build_model))
    with pytest.raises(StartupError) as caught:
        load(checkpoint)
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
    assert "--dtype bfloat16" in caught.value.message


def test_bad_weights_are_found_before_memory_is_taken(checkpoint, monkeypatch):
    change(checkpoint, lambda tensors: tensors.pop("model.norm.weight"))
    monkeypatch.setattr(weight_loader, "build_model", build_on_meta_only(weight_loader.build_model))
    refusal(checkpoint)


def build_on_meta_only(build):
    def build_checked(config, num_positions, dtype, where, *others):
        assert where.type == "meta", "memory was taken"
        return build(config, num_positions, dtype, where, *others)

    return build_checked
