"""Steps of every shape give each request what it would get alone, and nothing passes from one request to another."""

from __future__ import annotations

import random

import pytest
import tiny_llama
import torch
from step_driver import StepDriver

from octavo.protocol.engine_messages import ErrorCode
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import CachedRequest, NewRequest, SchedulerOutput
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.config import read_config
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler
from octavo.worker.weight_loader import load_model

CPU = torch.device("cpu")
MAX_NUM_SEQS = 16
NUM_OUTPUT = 12
VOCAB_SIZE = tiny_llama.SIZES["vocab_size"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tiny_llama.save(tiny_llama.build(), tmp_path_factory.mktemp("model"))
    config = tiny_llama.engine_config(directory).model
    return load_model(config, read_config(config.path), torch.float32, CPU)


class RecordingSampler(Sampler):
    """Keeps a copy of the logits of the last step, and can spoil rows of them."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, (), CPU)
        self.logits: torch.Tensor | None = None

    def sample(self, logits, batch):
        self.logits = logits.clone()
        return super().sample(logits, batch)


def make_runner(model, block_size: int = 4, num_blocks: int = 600) -> ModelRunner:
    sizes = model.config
    shape = (sizes.num_layers, 2, num_blocks, block_size, sizes.num_kv_heads, sizes.head_dim)
    states = RequestStates(MAX_NUM_SEQS, tiny_llama.MAX_MODEL_LEN, block_size)
    return ModelRunner(model, torch.full(shape, torch.nan), RecordingSampler(), states)


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB_SIZE) for i in range(length)]


PROMPTS = {f"r{i}": prompt_of(3 + 7 * i, i) for i in range(MAX_NUM_SEQS)}


@pytest.fixture(scope="module")
def alone(model):
    """Each request by itself, its prompt in one step."""
    outputs = {}
    for request_id, prompt in PROMPTS.items():
        driver = StepDriver(make_runner(model))
        driver.add(request_id, prompt)
        outputs |= driver.run_until(NUM_OUTPUT, chunk=200)
    return outputs


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_sixteen_at_once_equal_alone(model, alone, chunk, block_size):
    driver = StepDriver(make_runner(model, block_size, 3000 // block_size), seed=chunk)
    for request_id, prompt in PROMPTS.items():
        driver.add(request_id, prompt)
    assert driver.run_until(NUM_OUTPUT, chunk) == alone


def test_prefill_and_decode_share_steps(model, alone):
    """Requests join one by one, so that most steps hold chunks of prompts and decodes side by side."""
    driver = StepDriver(make_runner(model))
    waiting = list(PROMPTS)
    while waiting or any(len(request.output) < NUM_OUTPUT for request in driver.requests.values()):
        if waiting:
            request_id = waiting.pop(0)
            driver.add(request_id, PROMPTS[request_id])
        counts = {
            name: min(6, request.num_tokens - request.num_computed)
            for name, request in driver.requests.items()
            if len(request.output) < NUM_OUTPUT
        }
        driver.step(**counts)
    assert {name: request.output for name, request in driver.requests.items()} == alone


def test_logits_have_the_same_bits_in_every_company(model):
    prompt = PROMPTS["r5"]
    lonely = StepDriver(make_runner(model))
    lonely.add("a", prompt)
    lonely.step(a=len(prompt))
    expected = lonely.runner.sampler.logits[0]

    crowd = StepDriver(make_runner(model), seed=3)
    crowd.add("b", PROMPTS["r9"])
    crowd.add("a", prompt)
    crowd.add("c", PROMPTS["r1"])
    crowd.step(b=11, a=len(prompt) - 3)
    crowd.step(c=len(PROMPTS["r1"]), b=5, a=3)
    actual = crowd.runner.sampler.logits[1]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("when", [1, 4, 9])
def test_preempted_and_resumed_requests_go_on_as_before(model, alone, when):
    driver = StepDriver(make_runner(model), seed=when)
    for request_id in ("r3", "r4", "r5"):
        driver.add(request_id, PROMPTS[request_id])
    driver.run_until(when, chunk=9)
    driver.preempt("r4")
    driver.run_until(NUM_OUTPUT, chunk=5)
    for request_id in ("r3", "r4", "r5"):
        assert driver.requests[request_id].output == alone[request_id]


def test_a_row_carries_nothing_over(model, alone):
    """Rows, blocks and everything else that the last holder left is poisoned before the next one comes."""
    driver = StepDriver(make_runner(model, num_blocks=60))
    driver.add("other", prompt_of(120, 99), temperature=2.0, top_k=3)
    driver.run_until(NUM_OUTPUT, chunk=30)
    driver.drop("other")
    driver.add("filler", [1])
    driver.step(filler=1)  # takes the drop along
    states = driver.runner.states
    free = states.free_rows
    states.token_ids[free] = -1
    states.block_tables[free] = 10**6
    states.num_tokens[free] = states.num_prompt_tokens[free] = 10**6
    states.num_computed_tokens[free] = states.num_blocks[free] = 10**6
    states.has_failed[free] = True
    driver.runner.kv_cache[:, :, driver.free_blocks] = torch.nan
    driver.add("r6", PROMPTS["r6"])
    assert driver.run_until(NUM_OUTPUT, chunk=8)["r6"] == alone["r6"]


def test_sampled_tokens_depend_on_seed_and_position_only(model):
    """A request sampled at temperature 1 is the same alone, in company, and when it resumes after a preemption."""
    params = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    lonely = StepDriver(make_runner(model))
    lonely.add("a", PROMPTS["r4"], **params)
    expected = lonely.run_until(NUM_OUTPUT, chunk=200)["a"]

    crowd = StepDriver(make_runner(model), seed=1)
    for request_id in ("r1", "r2", "r8"):
        crowd.add(request_id, PROMPTS[request_id], temperature=1.5, seed=1)
    crowd.add("a", PROMPTS["r4"], **params)
    crowd.run_until(5, chunk=6)
    crowd.preempt("a")
    assert crowd.run_until(NUM_OUTPUT, chunk=7)["a"] == expected

    other = StepDriver(make_runner(model))
    other.add("a", PROMPTS["r4"], **{**params, "seed": 8})
    assert other.run_until(NUM_OUTPUT, chunk=200)["a"] != expected


def test_min_tokens_reaches_the_sampler_with_the_right_position(model, alone):
    first, second = alone["r7"][:2]
    assert first != second
    driver = StepDriver(make_runner(model))
    request = SamplingParams(max_tokens=9, min_tokens=1, temperature=0.0, stop_token_ids=(first, second))
    driver.add("r7", PROMPTS["r7"])
    driver.requests["r7"].params = request
    (sampled,) = driver.step(r7=len(PROMPTS["r7"])).sampled_token_ids["r7"]
    assert sampled not in (first, second)

    free = StepDriver(make_runner(model))
    free.add("r7", PROMPTS["r7"])
    free.requests["r7"].params = request
    free.requests["r7"].output = [first]
    assert free.step(r7=len(PROMPTS["r7"]) + 1).sampled_token_ids["r7"] == [second]


def test_a_request_with_nan_fails_alone(model, alone):
    driver = StepDriver(make_runner(model))
    for request_id in ("r2", "r3", "r4"):
        driver.add(request_id, PROMPTS[request_id])
    driver.run_until(3, chunk=200)
    driver.runner.kv_cache[:, :, driver.requests["r3"].blocks[0]] = torch.nan
    output = driver.step(r2=1, r3=1, r4=1)
    assert output.errors == {"r3": ErrorCode.NUMERICAL_ERROR}
    assert output.sampled_token_ids.keys() == {"r2", "r4"}
    states = driver.runner.states
    assert states.num_tokens[states.rows["r3"]] == driver.requests["r3"].num_tokens

    late = driver.runner.execute(SchedulerOutput(driver.step_id, [], [], [], [], [], {"r3": 1}))
    assert (late.sampled_token_ids, late.errors) == ({}, {})  # its next step was already on the way

    driver.drop("r3")  # its blocks, NaN and all, go to a newcomer
    driver.add("r6", PROMPTS["r6"])
    driver.run_until(NUM_OUTPUT, chunk=9)
    for request_id in ("r2", "r4", "r6"):
        assert driver.requests[request_id].output == alone[request_id]


def test_the_worker_feeds_itself_the_sampled_token(model, alone):
    """Two steps in flight: the second names no token, and none has to come back first."""
    runner = make_runner(model)
    prompt = PROMPTS["r2"]
    params = SamplingParams(max_tokens=9, temperature=0.0)
    new = NewRequest("r2", prompt, [], params, [5, 3, 9, 1, 7, 2, 8], 0)
    first = runner.execute(SchedulerOutput(0, [], [], [], [new], [], {"r2": len(prompt)}))
    second = runner.execute(SchedulerOutput(1, [], [], [], [], [], {"r2": 1}))
    assert first.sampled_token_ids["r2"] + second.sampled_token_ids["r2"] == alone["r2"][:2]


def test_a_step_may_follow_the_last_token_that_fits(model):
    """With two steps in flight the last token may be sampled while the next step is already on its way."""
    driver = StepDriver(make_runner(model))
    driver.add("a", prompt_of(tiny_llama.MAX_MODEL_LEN - 1, 1))
    driver.step(a=tiny_llama.MAX_MODEL_LEN - 1)
    driver.step(a=1)
    assert driver.requests["a"].num_tokens == tiny_llama.MAX_MODEL_LEN + 1


def test_a_step_without_tokens_only_drops(model):
    driver = StepDriver(make_runner(model))
    driver.add("a", [1, 2])
    driver.step(a=2)
    driver.drop("a")
    assert driver.step().sampled_token_ids == {}
    assert driver.runner.states.rows == {}
    assert len(driver.runner.states.free_rows) == MAX_NUM_SEQS


def test_only_sampled_rows_pass_through_the_head(model):
    driver = StepDriver(make_runner(model))
    for request_id in ("r2", "r3"):
        driver.add(request_id, PROMPTS[request_id])
    driver.step(r2=len(PROMPTS["r2"]), r3=4)
    assert driver.runner.sampler.logits.shape == (1, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (SchedulerOutput(0, [], [], [], [], [], {"nobody": 1}), KeyError),
        (SchedulerOutput(0, [], [], [], [], [CachedRequest("nobody", [1])], {}), KeyError),
        (SchedulerOutput(0, [], [(1, 2)], [], [], [], {}), ValueError),
        (SchedulerOutput(0, [], [], [(1, 2)], [], [], {}), ValueError),
    ],
)
def test_a_step_that_does_not_fit_the_rows_is_an_error(model, step, problem):
    with pytest.raises(problem):
        make_runner(model).execute(step)


@pytest.mark.parametrize(("num_blocks", "num_scheduled"), [(1, 5), (2, 6)])
def test_a_step_past_the_tokens_or_blocks_of_a_request_is_an_error(model, num_blocks, num_scheduled):
    new = NewRequest("a", [1, 2, 3, 4, 5], [], SamplingParams(max_tokens=3), list(range(num_blocks)), 0)
    with pytest.raises(ValueError, match="request a: step reaches token"):
        make_runner(model).execute(SchedulerOutput(0, [], [], [], [new], [], {"a": num_scheduled}))
