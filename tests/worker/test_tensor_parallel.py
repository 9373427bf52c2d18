"""Several ranks compute what one computes, each with its share of the weights and nothing more."""

from __future__ import annotations

import gc
import weakref

import pytest
import tiny_gguf
import tiny_llama
import torch
from model_logits import all_logits
from rank_threads import run_ranks
from safetensors.torch import save_file

from octavo.protocol.config import WeightsFormat
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker import weight_loader
from octavo.worker.cpu_device import CPU_DEVICE
from octavo.worker.largest_step import _rank_0_says
from octavo.worker.layers.shares import split_heads
from octavo.worker.models.config import read_config
from octavo.worker.weight_loader import load_model, weights_num_bytes

CPU = torch.device("cpu")
NUM_OUTPUT = 24
PROMPT = [(7 * i * i + 3) % 160 for i in range(37)]
BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS = {  # name: options of the model, sizes of the group
    "plain": ({}, (2, 3, 4)),  # 6 query heads on 2 KV heads: 3 and 4 ranks share KV heads
    "uneven": ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}, (2, 3, 4)),
    "one_kv_head": ({"num_key_value_heads": 1}, (2, 4)),
    "multi_head": ({"num_key_value_heads": 6}, (4,)),
    "tied": ({"tie_word_embeddings": True}, (2, 3)),
    "biases": (BIASES, (2, 4)),
    "odd_sizes": ({"vocab_size": 151, "intermediate_size": 37, "head_dim": 20}, (2, 3)),
}
CASES = [(name, size) for name, (_, sizes) in MODELS.items() for size in sizes]


def save(directory, options, weights_format):
    """Write a model in this format; return the reference and the ModelConfig."""
    reference = tiny_llama.build(**options)
    vocab_size = reference.config.vocab_size
    if weights_format is WeightsFormat.SAFETENSORS:
        tiny_llama.save(reference, directory)
        return reference, tiny_llama.engine_config(directory, vocab_size=vocab_size).model
    reference.config.architectures = ["LlamaForCausalLM"]
    reference.config.save_pretrained(directory)
    path = tiny_gguf.write(directory / "model.gguf", tiny_gguf.stored_weights(reference), "F32")
    tiny_gguf.write_index(path, directory)
    changes = {"weights_path": str(path), "weights_format": weights_format, "vocab_size": vocab_size}
    return reference, tiny_llama.engine_config(directory, **changes).model


def load(model_config, group, dtype=torch.float32):
    return load_model(model_config, read_config(model_config.path), dtype, CPU, group)


def load_ranks(model_config, size, dtype=torch.float32):
    return run_ranks(size, lambda group: load(model_config, group, dtype))


def logits_of_ranks(model_config, size, dtype=torch.float32, prompt=PROMPT):
    return run_ranks(size, lambda group: all_logits(load(model_config, group, dtype), prompt))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of each model, the reference and the ModelConfig."""
    return {
        name: save(tmp_path_factory.mktemp(name), options, WeightsFormat.SAFETENSORS)
        for name, (options, _) in MODELS.items()
    }


@pytest.mark.parametrize(("name", "size"), CASES)
def test_logits_equal_those_of_one_rank(saved, name, size):
    _, config = saved[name]
    (expected,) = logits_of_ranks(config, 1)
    logits, *others = logits_of_ranks(config, size)
    assert others == [None] * (size - 1)
    torch.testing.assert_close(logits, expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_those_of_transformers(saved, name):
    """Computed anew for each token, so that every position counts; the caches of runners are tested with them."""
    reference, config = saved[name]
    expected = tiny_llama.greedy(reference, PROMPT, NUM_OUTPUT)

    def generate(group):
        model, output = load(config, group), []
        for _ in range(NUM_OUTPUT):
            logits = all_logits(model, PROMPT + output)
            token_id = torch.zeros(1, dtype=torch.int64) if logits is None else logits[-1:].argmax(-1)
            output.append(int(group.broadcast(token_id)))
        return output

    size = MODELS[name][1][0]
    assert run_ranks(size, generate) == [expected] * size


@pytest.mark.parametrize("size", [2, 4])
def test_bfloat16_is_as_close_to_float32_as_on_one_rank(tmp_path, size):
    _, config = save(tmp_path, BIASES, WeightsFormat.SAFETENSORS)
    (wide,) = logits_of_ranks(config, 1)
    (narrow,) = logits_of_ranks(config, 1, torch.bfloat16)
    split = logits_of_ranks(config, size, torch.bfloat16)[0]
    assert split.dtype is torch.float32
    assert (split - wide).norm() < 1.5 * (narrow - wide).norm()


@pytest.mark.parametrize("options", [{}, BIASES, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gguf_gives_each_rank_the_weights_that_safetensors_give(tmp_path, size, options):
    options = {"num_attention_heads": 12, "num_key_value_heads": 3, **options}
    (tmp_path / "gguf").mkdir()
    _, gguf_config = save(tmp_path / "gguf", options, WeightsFormat.GGUF)
    _, config = save(tmp_path / "safetensors", options, WeightsFormat.SAFETENSORS)
    for ours, theirs in zip(load_ranks(gguf_config, size), load_ranks(config, size), strict=True):
        for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(parameter, expected)


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1", "Q5_0"])
def test_shares_of_quantised_tensors_are_those_of_the_whole(tmp_path, quantization):
    sizes = {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 6, "num_key_value_heads": 2}
    reference = tiny_llama.build(**sizes)
    reference.config.architectures = ["LlamaForCausalLM"]
    reference.config.save_pretrained(tmp_path)
    path = tiny_gguf.write(tmp_path / "model.gguf", tiny_gguf.stored_weights(reference), quantization)
    tiny_gguf.write_index(path, tmp_path)
    config = tiny_llama.engine_config(tmp_path, weights_path=str(path), weights_format=WeightsFormat.GGUF).model
    (whole,) = load_ranks(config, 1)
    first, second = load_ranks(config, 2)
    for index, layer in enumerate(whole.layers):
        ours = [model.layers[index] for model in (first, second)]
        parts = layer.qkv_proj.weight.tensor.split((96, 32, 32))
        expected = [torch.cat([part.chunk(2)[rank] for part in parts]) for rank in (0, 1)]
        assert [half.qkv_proj.weight.tensor.tolist() for half in ours] == [half.tolist() for half in expected]
        assert torch.equal(torch.cat([half.o_proj.weight.tensor for half in ours], dim=1), layer.o_proj.weight.tensor)
        assert torch.equal(
            torch.cat([half.down_proj.weight.tensor for half in ours], dim=1), layer.down_proj.weight.tensor
        )
    assert torch.equal(
        torch.cat((first.embedding.weight.tensor, second.embedding.weight.tensor)), whole.embedding.weight.tensor
    )


def replicated_num_numbers(config, size):
    """Numbers that more than one rank holds, counted once for each rank but the first that does."""
    norms = (2 * config.num_layers + 1) * config.hidden_size
    kv_heads = sum(len(share.kv_heads) for share in head_shares(config, size)) - config.num_kv_heads
    kv_rows = 2 * kv_heads * config.head_dim * config.num_layers
    return (size - 1) * norms + kv_rows * (config.hidden_size + config.attention_bias)


def head_shares(config, size):
    return split_heads(config.num_query_heads, config.num_kv_heads, size)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_the_shares_sum_to_the_whole_model(saved, name, size):
    _, model_config = saved[name]
    (whole,) = load_ranks(model_config, 1)
    ranks = load_ranks(model_config, size)
    replicated = 4 * replicated_num_numbers(whole.config, size)
    assert sum(map(weights_num_bytes, ranks)) == weights_num_bytes(whole) + replicated
    assert max(map(weights_num_bytes, ranks)) < weights_num_bytes(whole)
    shares = head_shares(whole.config, size)
    assert [model.kv_shape.num_kv_heads for model in ranks] == [len(share.kv_heads) for share in shares]
    for model in ranks:
        assert (model.head.weight is model.embedding.weight) == whole.config.tie_word_embeddings


def test_a_group_of_one_computes_what_no_group_computes(tmp_path):
    _, config = save(tmp_path, BIASES, WeightsFormat.SAFETENSORS)
    alone = load_model(config, read_config(config.path), torch.float32, CPU)
    (grouped,) = logits_of_ranks(config, 1)
    assert torch.equal(all_logits(alone, PROMPT), grouped)


@pytest.mark.parametrize("token_id", [-1, 160])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_id_outside_the_vocabulary_is_an_error_in_every_group(tmp_path, size, token_id):
    _, config = save(tmp_path, {}, WeightsFormat.SAFETENSORS)
    with pytest.raises(IndexError):
        run_ranks(size, lambda group: load(config, group).embedding(torch.tensor([3, token_id, 5])))


def test_a_model_that_cannot_be_split_is_refused(saved):
    with pytest.raises(StartupError, match="num_attention_heads 6 with num_key_value_heads 2") as caught:
        load_ranks(saved["plain"][1], 7)
    assert caught.value.exit_code is ExitCode.USAGE


def test_shapes_are_compared_with_those_of_the_whole_checkpoint(tmp_path):
    _, config = save(tmp_path, {}, WeightsFormat.SAFETENSORS)
    tensors = dict(tiny_llama.build().named_parameters())
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(24, 48)  # what one of two ranks would hold
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"has shape \[24, 48\], config.json asks for \[48, 48\]"):
        load_ranks(config, 2)


@pytest.mark.parametrize("weights_format", WeightsFormat)
def test_one_tensor_at_a_time_is_in_memory(tmp_path, monkeypatch, weights_format):
    """The result of a read is gone before the next read: the host holds the model and one tensor."""
    _, config = save(tmp_path, {}, weights_format)
    living: list[weakref.ref] = []
    most_alive = 0

    def watched(stored):
        def read(rows=None):
            nonlocal most_alive
            living[:] = [reference for reference in living if reference() is not None]
            most_alive = max(most_alive, len(living))
            tensor = stored.read(rows)
            living.append(weakref.ref(tensor))
            return tensor

        return stored._replace(read=read)

    opened = weight_loader.open_checkpoint
    monkeypatch.setattr(
        weight_loader,
        "open_checkpoint",
        lambda *args: {name: watched(stored) for name, stored in opened(*args).items()},
    )
    gc.disable()  # only reference counts may be what frees it
    try:
        load_ranks(config, 1)
    finally:
        gc.enable()
    assert living
    assert most_alive == 0


def test_rank_0_decides_what_clocks_decide():
    assert run_ranks(2, lambda group: _rank_0_says(group, group.rank == 0, CPU_DEVICE)) == [True, True]
