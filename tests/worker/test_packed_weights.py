"""Models whose weights are packed compute what the same weights compute as plain numbers; on the torch references."""

from __future__ import annotations

import msgspec
import pytest
import tiny_gguf
import tiny_llama
import torch
from model_logits import all_logits
from rank_threads import run_ranks

from octavo.kernels.ops.packed_linear import WeightFormat, row_num_bytes
from octavo.protocol.config import Dtype, Quantization, WeightsFormat
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker import weight_loader
from octavo.worker.layers.linear_weight import HeldPacked
from octavo.worker.models.config import read_config
from octavo.worker.weight_formats import describe_formats
from octavo.worker.weight_loader import load_model, weights_num_bytes

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": True,
    "mlp_bias": True,
}
PROMPT = [(7 * i * i + 3) % 160 for i in range(37)]
BLOCKS = ("Q8_0", "Q4_0", "Q4_1")


def save_gguf(directory, quantizations="Q4_1", **options):
    """Write a GGUF model; `quantizations` is one for all matrices, or a function of the tensor's name."""
    directory.mkdir(exist_ok=True)
    reference = tiny_llama.build(**{**SIZES, **options})
    reference.config.architectures = ["LlamaForCausalLM"]
    reference.config.save_pretrained(directory)
    path = tiny_gguf.write(directory / "model.gguf", tiny_gguf.stored_weights(reference), quantizations)
    tiny_gguf.write_index(path, directory)
    changes = {"weights_path": str(path), "weights_format": WeightsFormat.GGUF, "dtype": None}
    return tiny_llama.engine_config(directory, **changes).model


def save_safetensors(directory, **options):
    tiny_llama.save(tiny_llama.build(**{**SIZES, **options}), directory)
    return tiny_llama.engine_config(directory, dtype=None).model


def load(config, quantization=Quantization.AUTO, dtype=torch.float32, packs_weights=True, **options):
    config = msgspec.structs.replace(config, quantization=quantization)
    return load_model(config, read_config(config.path), dtype, CPU, packs_weights=packs_weights, **options)


def formats(model) -> set[WeightFormat]:
    return {module.packed.format for module in model.modules() if isinstance(module, HeldPacked)}


def assert_same_logits(model, expected):
    torch.testing.assert_close(all_logits(model, PROMPT), all_logits(expected, PROMPT), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, {"attention_bias": False, "mlp_bias": False}])
@pytest.mark.parametrize("quantization", BLOCKS)
def test_blocks_of_a_file_are_multiplied_as_they_are(tmp_path, quantization, options):
    config = save_gguf(tmp_path, quantization, **options)
    model = load(config)
    assert formats(model) == {WeightFormat(quantization)}
    assert_same_logits(model, load(config, packs_weights=False))


@pytest.mark.parametrize("quantization", ["F32", "F16", "Q5_0"])
def test_what_kernels_do_not_multiply_is_widened(tmp_path, quantization):
    config = save_gguf(tmp_path, quantization)
    model = load(config)
    assert formats(model) == {WeightFormat.FLOAT32}
    assert_same_logits(model, load(config, packs_weights=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_stay_as_they_are(tmp_path, dtype):
    config = save_safetensors(tmp_path)
    model, plain = load(config, dtype=dtype), load(config, dtype=dtype, packs_weights=False)
    assert formats(model) == {WeightFormat.FLOAT32 if dtype is torch.float32 else WeightFormat.BFLOAT16}
    error = all_logits(model, PROMPT) - all_logits(plain, PROMPT)
    assert error.norm() <= (1e-5 if dtype is torch.float32 else 6e-2) * all_logits(plain, PROMPT).norm()
    assert weights_num_bytes(model) == weights_num_bytes(plain)


def test_none_widens_blocks(tmp_path):
    config = save_gguf(tmp_path, "Q4_1")
    model = load(config, Quantization.NONE, torch.bfloat16)
    assert formats(model) == {WeightFormat.BFLOAT16}


def test_a_user_who_asks_for_float32_gets_it(tmp_path):
    config = msgspec.structs.replace(save_gguf(tmp_path, "Q4_1"), dtype=Dtype.FLOAT32)
    assert formats(load(config)) == {WeightFormat.FLOAT32}
    assert formats(load(config, Quantization.INT8)) == {WeightFormat.Q4_1}


@pytest.mark.parametrize(
    ("quantization", "layers", "vocabulary", "relative_error"),
    [
        (Quantization.INT8, WeightFormat.Q8_0, WeightFormat.Q8_0, 0.1),
        (Quantization.INT4, WeightFormat.Q4_1, WeightFormat.Q8_0, 0.8),
    ],
)
def test_numbers_are_rounded_to_blocks(tmp_path, quantization, layers, vocabulary, relative_error):
    config = save_safetensors(tmp_path)
    model, plain = load(config, quantization), load(config, packs_weights=False)
    for layer in model.layers:
        for part in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj):
            assert part.weight.packed.format is layers
    assert {part.weight.packed.format for part in (model.embedding, model.head)} == {vocabulary}
    expected = all_logits(plain, PROMPT)
    error = (all_logits(model, PROMPT) - expected).norm() / expected.norm()
    assert 0 < error < relative_error


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
@pytest.mark.parametrize("stored", BLOCKS)
def test_blocks_are_never_rounded_again(tmp_path, stored, quantization):
    config = save_gguf(tmp_path, stored)
    model, expected = load(config, quantization), load(config)
    assert formats(model) == {WeightFormat(stored)}
    assert torch.equal(all_logits(model, PROMPT), all_logits(expected, PROMPT))


def mixed(name: str) -> str:
    return "Q8_0" if "attn_v" in name or name.startswith(("token_embd", "output")) else "Q4_1"


def test_parts_in_different_blocks_are_widened(tmp_path):
    config = save_gguf(tmp_path, mixed)
    model = load(config)
    for layer in model.layers:
        assert layer.qkv_proj.weight.packed.format is WeightFormat.FLOAT32
        assert layer.o_proj.weight.packed.format is WeightFormat.Q4_1
    assert model.head.weight.packed.format is WeightFormat.Q8_0
    assert_same_logits(model, load(config, packs_weights=False))
    assert describe_formats(model).count("MiB") == 3


def test_rows_that_are_no_whole_blocks_are_not_rounded(tmp_path):
    config = save_safetensors(tmp_path, hidden_size=48, head_dim=8)
    model = load(config, Quantization.INT8)
    assert model.layers[0].qkv_proj.weight.packed.format is WeightFormat.FLOAT32
    assert model.layers[0].down_proj.weight.packed.format is WeightFormat.Q8_0
    assert not torch.equal(all_logits(model, PROMPT), all_logits(load(config), PROMPT))


def test_a_tied_head_shares_the_blocks(tmp_path):
    model = load(save_gguf(tmp_path, "Q8_0", tie_word_embeddings=True))
    assert model.head.weight is model.embedding.weight
    untied = load(save_gguf(tmp_path / "untied", "Q8_0"))
    vocabulary_bytes = 160 * row_num_bytes(WeightFormat.Q8_0, 96)
    assert weights_num_bytes(untied) - weights_num_bytes(model) == vocabulary_bytes


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("save", "quantization"),
    [(save_gguf, Quantization.AUTO), (save_safetensors, Quantization.INT8), (save_safetensors, Quantization.NONE)],
)
def test_ranks_compute_what_one_computes(tmp_path, save, quantization, size):
    config = save(tmp_path, intermediate_size=192)  # whole blocks for each of 2 or 3 ranks
    (expected,) = run_ranks(1, lambda group: all_logits(load(config, quantization, group=group), PROMPT))
    logits = run_ranks(size, lambda group: all_logits(load(config, quantization, group=group), PROMPT))[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_columns_that_are_cut_inside_a_block_are_widened(tmp_path):
    """160 neurons on 2 ranks: 80 each, which are not whole blocks."""
    config = save_gguf(tmp_path, "Q4_1")
    for model in run_ranks(2, lambda group: load(config, group=group)):
        assert model.layers[0].down_proj.weight.packed.format is WeightFormat.FLOAT32
        assert model.layers[0].o_proj.weight.packed.format is WeightFormat.Q4_1
        assert model.layers[0].gate_up_proj.weight.packed.format is WeightFormat.Q4_1


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_a_device_without_such_kernels_refuses(tmp_path, quantization):
    with pytest.raises(StartupError, match=f"--quantization {quantization}: needs the compiled kernels") as caught:
        load(save_safetensors(tmp_path), quantization, packs_weights=False)
    assert caught.value.exit_code is ExitCode.USAGE


def test_auto_says_that_it_widens(tmp_path, caplog):
    with caplog.at_level("INFO"):
        load(save_gguf(tmp_path, "Q4_1"), packs_weights=False)
    assert "weights in Q4_1 are widened" in caplog.text


def test_memory_is_checked_for_what_is_held(tmp_path):
    config = save_gguf(tmp_path, "Q4_1")
    needed = weights_num_bytes(load(config))
    assert needed < weights_num_bytes(load(config, packs_weights=False)) / 4
    load(config, free_bytes=needed)
    with pytest.raises(StartupError) as caught:
        load(config, free_bytes=needed - 1)
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY


@pytest.mark.parametrize("quantization", [Quantization.AUTO, Quantization.INT8])
@pytest.mark.parametrize("save", [save_gguf, save_safetensors])
def test_pieces_make_the_whole(tmp_path, monkeypatch, save, quantization):
    config = save(tmp_path)
    whole = load(config, quantization)
    monkeypatch.setattr(weight_loader, "PIECE_NUM_WEIGHTS", 500)
    for ours, expected in zip(load(config, quantization).parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_the_file_is_not_mapped_any_more(tmp_path):
    config = save_gguf(tmp_path, "Q4_1")
    model = load(config)
    with open("/proc/self/maps") as maps:
        assert config.weights_path not in maps.read()
    assert all_logits(model, PROMPT).isfinite().all()
