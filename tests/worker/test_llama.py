"""The Llama family against transformers: logits, then greedy tokens through steps of every shape."""

from __future__ import annotations

import msgspec
import pytest
import tiny_llama
import torch
from model_logits import all_logits
from step_driver import StepDriver, poisoned_runner

from octavo.protocol.config import CacheConfig, ModelConfig
from octavo.worker.layers.rotary import rotary_frequencies
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.config import SUPPORTED_ARCHITECTURES, read_config
from octavo.worker.models.registry import ARCHITECTURES
from octavo.worker.models.rope_config import RopeConfig, RopeType
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler
from octavo.worker.weight_loader import load_model

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": {},
    "multi_head": {"num_key_value_heads": 6},
    "one_kv_head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide_heads": {"head_dim": 20},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE},
    "dynamic_rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}},
}


NUM_OUTPUT = 64


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny_llama.SIZES["vocab_size"], (length,), generator=generator).tolist()


PROMPT = prompt_of(37)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    reference = tiny_llama.build(**VARIANTS[request.param])
    directory = tiny_llama.save(reference, tmp_path_factory.mktemp(request.param))
    return reference, load(tiny_llama.engine_config(directory).model), tiny_llama.greedy(reference, PROMPT, NUM_OUTPUT)


def load(model_config: ModelConfig, dtype=torch.float32):
    return load_model(model_config, read_config(model_config.path), dtype, CPU)


def runner_for(model, block_size: int = 16, num_blocks: int = 256) -> ModelRunner:
    states = RequestStates(16, tiny_llama.MAX_MODEL_LEN, block_size)
    return poisoned_runner(model, Sampler(model.config.vocab_size, ()), states, block_size, num_blocks)


def test_logits_equal_those_of_transformers(variant):
    reference, model, _ = variant
    prompt = prompt_of(150)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(all_logits(model, prompt), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("block_size", "chunk"), [(1, 1), (3, 7), (16, 5), (16, 200), (32, 64)])
def test_greedy_tokens_equal_those_of_transformers(variant, block_size, chunk):
    _, model, expected = variant
    driver = StepDriver(runner_for(model, block_size))
    driver.add("a", PROMPT)
    assert driver.run_until(NUM_OUTPUT, chunk) == {"a": expected}


def test_bfloat16_stays_close_to_float32(tmp_path):
    config = tiny_llama.engine_config(tiny_llama.save(tiny_llama.build(), tmp_path)).model
    wide, narrow = (all_logits(load(config, dtype), prompt_of(40)) for dtype in (torch.float32, torch.bfloat16))
    assert narrow.dtype == torch.float32
    relative_error = (wide - narrow).norm() / wide.norm()
    assert 0 < relative_error < 0.05


def test_the_names_known_without_torch_are_those_that_can_be_built():
    assert tuple(ARCHITECTURES) == SUPPORTED_ARCHITECTURES


def test_dynamic_scaling_starts_beyond_the_trained_length():
    rope = RopeConfig(theta=100.0, rope_type=RopeType.DYNAMIC, factor=2.0, original_max_position_embeddings=64)
    plain = rotary_frequencies(RopeConfig(theta=100.0), 8, 64)
    assert torch.equal(rotary_frequencies(rope, 8, 64), plain)
    stretched = rotary_frequencies(rope, 8, 128)
    assert torch.equal(stretched[:1], plain[:1])
    assert (stretched[1:] < plain[1:]).all()


def test_dynamic_scaling_equals_transformers_at_the_longest_context(tmp_path):
    options = {"max_position_embeddings": 64, **VARIANTS["dynamic_rope"]}
    reference = tiny_llama.build(**options)
    config = tiny_llama.engine_config(tiny_llama.save(reference, tmp_path), max_model_len=100)
    config = msgspec.structs.replace(config, cache=CacheConfig(num_device_blocks=8))
    prompt = prompt_of(100)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(all_logits(load(config.model), prompt), expected, atol=2e-4, rtol=2e-4)
