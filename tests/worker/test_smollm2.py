"""The default model, from its GGUF file, against transformers reading the same file: logits and greedy tokens."""

from __future__ import annotations

import pytest
import torch
from smollm2_reference import encode_prompts, load_reference
from step_driver import StepDriver, poisoned_runner

from octavo.protocol.config import ModelConfig, WeightsFormat
from octavo.worker.models.config import read_config
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler
from octavo.worker.weight_loader import load_model

pytestmark = pytest.mark.model
CPU = torch.device("cpu")
MAX_MODEL_LEN = 512
NUM_OUTPUT = 24


@pytest.fixture(scope="module")
def reference(smollm2_gguf):
    return load_reference(smollm2_gguf)


@pytest.fixture(scope="module")
def prompts(smollm2_directory):
    return encode_prompts(smollm2_directory)


@pytest.fixture(scope="module")
def expected(reference, prompts):
    """Greedy continuations by transformers."""
    return {
        f"r{index}": reference.generate(torch.tensor([prompt]), max_new_tokens=NUM_OUTPUT, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for index, prompt in enumerate(prompts)
    }


class RecordingSampler(Sampler):
    """Keeps the logits of every step."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, ())
        self.steps: list[torch.Tensor] = []

    def sample(self, logits, batch):
        self.steps.append(logits.clone())
        return super().sample(logits, batch)


@pytest.fixture(scope="module")
def model(smollm2_gguf, smollm2_directory):
    config = read_config(str(smollm2_directory))
    model_config = ModelConfig(
        path=str(smollm2_directory),
        weights_path=str(smollm2_gguf),
        weights_format=WeightsFormat.GGUF,
        served_model_names=("smollm2",),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=config.vocab_size,
    )
    return load_model(model_config, config, torch.float32, CPU)


def make_driver(model, block_size: int) -> StepDriver:
    states = RequestStates(8, MAX_MODEL_LEN, block_size)
    sampler = RecordingSampler(model.config.vocab_size)
    return StepDriver(poisoned_runner(model, sampler, states, block_size, 1024 // block_size), uses_steady=True)


@torch.no_grad()
def test_logits_equal_those_of_transformers(model, reference, prompts):
    for prompt in prompts:
        driver = make_driver(model, 16)
        driver.add("a", prompt)
        driver.step(a=len(prompt))
        (logits,) = driver.runner.sampler.steps
        expected = reference(torch.tensor([prompt])).logits[0, -1:]
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize(("block_size", "chunk"), [(16, 512), (32, 7)])
def test_greedy_tokens_equal_those_of_transformers(model, prompts, expected, block_size, chunk):
    driver = make_driver(model, block_size)
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt)
    assert driver.run_until(NUM_OUTPUT, chunk) == expected
