"""What requests do to their logits is what the formula says, in any company, one step ahead and after a preemption."""

from __future__ import annotations

import math

import numpy as np
import pytest
from model_logits import all_logits
from step_driver import StepDriver
from tiny_runner import PROMPTS, VOCAB_SIZE, launch_ahead, make_runner

from octavo.protocol.engine_messages import ErrorCode
from octavo.protocol.sampling_params import SamplingParams
from octavo.worker.token_masks import pack_bits

NUM_TOKENS = 9
OPTIONS = {
    "repetition": {"repetition_penalty": 1.8},
    "encouraged": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": 1.3},
    "rewarded": {"presence_penalty": -1.8, "frequency_penalty": -1.9},
    "bias": {"logit_bias": ((3, 7.5), (50, -100.0), (VOCAB_SIZE, 9.0))},
    "foreign_bias": {"logit_bias": ((VOCAB_SIZE, 9.0),)},
    "allowed": {"allowed_token_ids": (*range(1, VOCAB_SIZE, 2), VOCAB_SIZE + 1)},
    "ends": {"min_tokens": 4, "stop_token_ids": (24, 67, VOCAB_SIZE)},
    "word": {"bad_words": ((24,), (67, 64), (1, 2, 3))},
    "all": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.5,
        "logit_bias": ((3, 2.0), (24, 9.0), (67, 3.0)),
        "bad_words": ((64,), (3, 3)),
        "allowed_token_ids": tuple(range(0, VOCAB_SIZE, 1)),
        "min_tokens": 2,
        "stop_token_ids": (35,),
    },
}


def is_forbidden(token_id: int, output: list[int], params: SamplingParams) -> bool:
    if params.allowed_token_ids and token_id not in params.allowed_token_ids:
        return True
    if len(output) < params.min_tokens and token_id in params.stop_token_ids:
        return True
    ending = [*output, token_id]
    return any(ending[-len(word) :] == list(word) for word in params.bad_words)


def edited(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """The formula, token by token, in fp64."""
    result = logits.astype(np.float64)
    for token_id in range(VOCAB_SIZE):
        if is_forbidden(token_id, output, params):
            result[token_id] = -np.inf
            continue
        logit = result[token_id] + dict(params.logit_bias).get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        count = output.count(token_id)
        logit -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        result[token_id] = logit
    return result


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("uses_steady", [False, True])
def test_logits_are_those_of_the_formula_at_every_position(tiny_model, alone, name, uses_steady):
    prompt = PROMPTS["r3"]
    driver = StepDriver(make_runner(tiny_model), uses_steady=uses_steady)
    driver.add("plain", PROMPTS["r2"])
    driver.add("a", prompt, **OPTIONS[name])
    params = driver.requests["a"].params
    for _ in range(NUM_TOKENS):
        output = list(driver.requests["a"].output)
        driver.step(**{key: each.num_tokens - each.num_computed for key, each in driver.requests.items()})
        raw = all_logits(tiny_model, prompt + output)[-1].numpy()
        expected = edited(raw, prompt, output, params)
        actual = driver.runner.sampler.logits[1].numpy()
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        assert driver.sampled["a"] == expected.argmax()
    assert driver.requests["plain"].output == alone["r2"][:NUM_TOKENS]


def spoken(driver: StepDriver, name: str) -> list[int]:
    driver.add("a", PROMPTS["r3"], **OPTIONS[name])
    return driver.run_until(NUM_TOKENS, chunk=50)["a"]


@pytest.fixture(scope="module")
def one_by_one(tiny_model):
    """What each says when nothing happens."""
    return {name: list(spoken(StepDriver(make_runner(tiny_model)), name)) for name in OPTIONS}


def test_the_options_matter(one_by_one, alone):
    same = [name for name, output in one_by_one.items() if output == alone["r3"][:NUM_TOKENS]]
    assert same == ["foreign_bias"]


def test_one_step_ahead_all_of_them_say_the_same(tiny_model, one_by_one):
    requests = {
        name: (PROMPTS["r3"], SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, **options))
        for name, options in OPTIONS.items()
    }
    results = launch_ahead(make_runner(tiny_model), NUM_TOKENS, **requests)
    token_ids = zip(*(result.sampled_token_ids for result in results), strict=True)
    assert {name: list(row) for name, row in zip(OPTIONS, token_ids, strict=True)} == one_by_one


@pytest.mark.parametrize("name", ["repetition", "frequency", "allowed", "all"])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_preempted_request_goes_on_as_if_nothing_had_been(tiny_model, one_by_one, name, is_swapped):
    """Another one has its row, with other tokens and options, in between."""
    for when in (1, 4):
        driver = StepDriver(make_runner(tiny_model, num_host_blocks=40), seed=when)
        driver.add("a", PROMPTS["r3"], **OPTIONS[name])
        driver.run_until(when, chunk=50)
        if is_swapped:
            driver.swap_out("a")
        else:
            dropped = driver.drop("a")
        driver.add("b", PROMPTS["r5"], repetition_penalty=3.0, allowed_token_ids=(5, 6, 7))
        driver.run_until(3, chunk=50)
        driver.drop("b")
        if is_swapped:
            driver.swap_in("a")
        else:
            driver.requests["a"] = type(dropped)(dropped.prompt, dropped.params, dropped.output)
        assert driver.run_until(NUM_TOKENS, chunk=50)["a"] == one_by_one[name]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("repetition", {"logit_bias": ((3, 0.5),)}),
        ("bias", {"frequency_penalty": 0.5}),
        ("allowed", {"frequency_penalty": 0.5}),
        ("word", {"frequency_penalty": 0.5}),
        ("ends", {"frequency_penalty": 0.5}),
    ],
)
def test_a_row_does_what_its_request_asks_and_nothing_of_the_one_before(tiny_model, before, after):
    driver = StepDriver(make_runner(tiny_model))
    driver.add("old", PROMPTS["r3"], **OPTIONS[before])
    driver.run_until(1, chunk=50)
    row = driver.runner.states.rows["old"]
    driver.drop("old")
    driver.add("new", PROMPTS["r3"], **after)
    driver.step(new=len(PROMPTS["r3"]))
    assert driver.runner.states.rows["new"] == row
    raw = all_logits(tiny_model, PROMPTS["r3"])[-1].numpy()
    expected = edited(raw, PROMPTS["r3"], [], driver.requests["new"].params)
    np.testing.assert_allclose(driver.runner.sampler.logits[0].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_what_a_step_does_not_need_is_not_prepared(tiny_model, monkeypatch):
    """Nobody asks, or nobody any more: `min_tokens` is over."""
    runner = make_runner(tiny_model)
    monkeypatch.setattr(runner.edits, "apply", lambda *args: pytest.fail("logits are edited"))
    driver = StepDriver(runner)
    driver.add("r2", PROMPTS["r2"])
    driver.add("r3", PROMPTS["r3"], min_tokens=2, stop_token_ids=(3,))
    driver.requests["r3"].output = [5, 6]
    driver.run_until(4, chunk=50)
    assert runner.edits.counts.counts is runner.edits.masks.bits is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_logit_is_not_taken_for_a_forbidden_one(tiny_model, alone, bad):
    driver = StepDriver(make_runner(tiny_model))
    driver.add("r2", PROMPTS["r2"])
    driver.add("r3", PROMPTS["r3"], allowed_token_ids=(4, 5), bad_words=((7, 8),))
    compute_logits = driver.runner.model.compute_logits

    def compute_bad_logits(hidden):
        logits = compute_logits(hidden)
        logits[1, 3] = bad
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver.runner.model, "compute_logits", compute_bad_logits)
        output = driver.step(r2=len(PROMPTS["r2"]), r3=len(PROMPTS["r3"]))
    assert output.errors == {"r3": ErrorCode.NUMERICAL_ERROR}
    assert driver.sampled["r2"] == alone["r2"][0]


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": (VOCAB_SIZE,)},
        {"allowed_token_ids": (3, 4), "bad_words": ((3,), (4,))},
        {"allowed_token_ids": (3,), "min_tokens": 1, "stop_token_ids": (3,)},
    ],
    ids=str,
)
def test_a_request_without_a_token_left_fails_alone(tiny_model, alone, options):
    driver = StepDriver(make_runner(tiny_model))
    driver.add("r2", PROMPTS["r2"])
    driver.add("r3", PROMPTS["r3"], **options)
    output = driver.step(r2=len(PROMPTS["r2"]), r3=len(PROMPTS["r3"]))
    assert output.errors == {"r3": ErrorCode.NOTHING_ALLOWED}
    assert driver.step(r2=1).sampled_token_ids == [alone["r2"][1]]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 160])
def test_bits_of_a_mask(vocab_size):
    token_ids = [i for i in range(vocab_size) if i % 3 == 0]
    words = pack_bits(token_ids, vocab_size)
    assert (words.dtype, len(words)) == (np.int32, -(-vocab_size // 32))
    set_bits = [i for i in range(32 * len(words)) if int(words.view(np.uint32)[i // 32]) >> (i % 32) & 1]
    assert set_bits == token_ids
