"""The default model, from its GGUF file, against transformers reading the same file: logits and greedy tokens."""

from __future__ import annotations

import pytest
import torch
import transformers
from step_driver import StepDriver, poisoned_runner
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from octavo.protocol.config import ModelConfig, WeightsFormat
from octavo.worker.models.config import read_config
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler
from octavo.worker.weight_loader import load_model

pytestmark = pytest.mark.model
CPU = torch.device("cpu")
MAX_MODEL_LEN = 512
NUM_OUTPUT = 24
PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
)


@pytest.fixture(scope="module")
def reference(smollm2_gguf):
    """The model as transformers reads the file; its from_pretrained would need one more package to do the same."""
    config = load_gguf_checkpoint(str(smollm2_gguf))["config"]
    with no_init_weights():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    tensors = load_gguf_checkpoint(str(smollm2_gguf), return_tensors=True, model_to_load=model)["tensors"]
    keys = model.load_state_dict(tensors, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["lm_head.weight"], [])  # tied
    model.tie_weights()
    model.generation_config.eos_token_id = None  # generate goes on after it, as the driver does
    return model.eval()


@pytest.fixture(scope="module")
def prompts(smollm2_directory):
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(smollm2_directory / "tokenizer.json"))
    return [tokenizer.encode(text) for text in PROMPTS]


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
