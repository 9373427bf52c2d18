"""Steps as a recorded list of kernels: the bits of single kernels in any mix; and what does not fit a list."""

from __future__ import annotations

import pytest
import tiny_llama
import torch
from step_driver import StepDriver, poisoned_runner
from tiny_runner import RecordingSampler, prompt_of

from octavo.kernels.cpu.library import find_library
from octavo.protocol.worker_messages import ModelRunnerOutput
from octavo.worker.cpu_device import CpuDevice
from octavo.worker.graph import NO_GRAPHS
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.config import read_config
from octavo.worker.recorded_steps import RecordedSteps
from octavo.worker.request_states import RequestStates
from octavo.worker.weight_loader import load_model

pytestmark = pytest.mark.skipif(find_library() is None, reason="the CPU kernels were not compiled")

SIZES = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}  # heads of 16
MAX_TOKENS = 40
BLOCK_SIZE = 16


@pytest.fixture
def device() -> CpuDevice:
    made = CpuDevice(num_threads=2)
    made.select_kernels(is_deterministic=False)
    return made


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama.save(tiny_llama.build(**SIZES), tmp_path_factory.mktemp("model"))


def make_runner(directory, device: CpuDevice, dtype: torch.dtype, *, records: bool) -> ModelRunner:
    config = tiny_llama.engine_config(directory).model
    model = load_model(config, read_config(config.path), dtype, device.torch_device, packs_weights=device.packs_weights)
    states = RequestStates(8, tiny_llama.MAX_MODEL_LEN, BLOCK_SIZE)
    runner = poisoned_runner(model, RecordingSampler(), states, BLOCK_SIZE, 120, device=device, dtype=dtype)
    runner.max_num_batched_tokens = MAX_TOKENS
    if records:
        assert runner.record_steps().startswith("a list of ")
    return runner


def run_a_mix(runner: ModelRunner) -> tuple[list[torch.Tensor], list[ModelRunnerOutput]]:
    """Prompts whole, in chunks and token by token beside decodes; return the logits and results of every step."""
    driver, logits, results = StepDriver(runner, uses_steady=True), [], []

    def step(**num_tokens: int) -> None:
        results.append(driver.step(**num_tokens))
        logits.append(runner.sampler.logits)

    driver.add("a", prompt_of(37, 1), num_prompt_logprobs=2)
    driver.add("b", prompt_of(9, 2), temperature=0.8, seed=3, num_logprobs=1, repetition_penalty=1.5)
    step(a=37)
    step(a=1, b=5)
    step(a=1, b=4)
    driver.add("c", prompt_of(70, 4))
    step(a=1, b=1, c=38)
    step(a=1, b=1, c=31)
    for _ in range(20):
        step(a=1, b=1, c=1)
    driver.preempt("b")
    step(a=1, b=30, c=1)
    step(a=1, c=1)
    return logits, results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps_have_the_bits_of_single_kernels(directory, device, dtype):
    expected, expected_results = run_a_mix(make_runner(directory, device, dtype, records=False))
    runner = make_runner(directory, device, dtype, records=True)
    replays = []
    step = runner.graphs.step
    replay = step.commands.replay
    step.commands.replay = lambda num_tokens: (replays.append(num_tokens), replay(num_tokens))
    logits, results = run_a_mix(runner)
    assert len(replays) == len(logits) == len(expected)
    assert replays[:4] == [37, 6, 5, 40]
    for one, other in zip(logits, expected, strict=True):
        assert torch.equal(one, other)
    assert results == expected_results
    assert (len(results[0].prompt_logprobs), len(results[2].logprobs)) == (1, 1)


def test_a_step_that_does_not_fit_runs_kernel_by_kernel(directory, device):
    runner, plain = (make_runner(directory, device, torch.float32, records=records) for records in (True, False))
    found = []
    find = runner.graphs.find
    runner.graphs.find = lambda batch, plan: found.append(find(batch, plan)) or found[-1]
    for one in (runner, plain):
        driver = StepDriver(one)
        driver.add("long", prompt_of(90, 5))
        driver.step(long=90)  # more tokens than the list has
        driver.step(long=1)
    assert [graph is None for graph in found] == [True, False]
    assert torch.equal(runner.sampler.logits, plain.sampler.logits)


def test_tokens_that_only_the_device_knows(directory, device):
    """The next step is launched before the result of the one before is read."""
    runner = make_runner(directory, device, torch.float32, records=True)
    driver = StepDriver(runner, uses_steady=True)
    driver.add("a", prompt_of(12, 1))
    driver.run_until(6, chunk=40)
    expected = driver.requests["a"].output

    batch_tokens = torch.tensor([-1 - 5, 7, -1 - 0])
    runner.last_token_ids.copy_(torch.arange(100, 100 + len(runner.last_token_ids)))
    token_ids = batch_tokens.numpy().copy()
    runner.graphs.step._put_in_unknown_tokens(token_ids)
    assert token_ids.tolist() == [105, 7, 100]
    assert len(expected) == 6


def test_a_model_with_another_operation_is_not_recorded(directory, device, monkeypatch):
    runner = make_runner(directory, device, torch.float32, records=False)
    forward = runner.model.norm.add_and_norm
    monkeypatch.setattr(runner.model.norm, "add_and_norm", lambda x, residual: forward(x * 1, residual))
    detail = runner.record_steps()
    assert detail.startswith("steps are not recorded: aten.mul")
    assert runner.graphs is NO_GRAPHS
    assert not isinstance(runner.graphs, RecordedSteps)
    driver = StepDriver(runner)
    driver.add("a", prompt_of(12, 1))
    assert len(driver.run_until(3, chunk=40)["a"]) == 3
