"""Rows that report candidates, beside rows that sample, and as beams that go on from each other."""

from __future__ import annotations

import torch
from step_driver import StepDriver
from tiny_runner import NUM_OUTPUT, PROMPTS, VOCAB_SIZE, make_runner

from octavo.protocol.engine_messages import ErrorCode
from octavo.protocol.worker_messages import NO_TOKEN, CopyKind


def test_candidates_and_tokens_share_a_step(tiny_model, alone):
    """A request that reports candidates, and is told the likeliest, goes as greedy ones do; its neighbours as well."""
    driver = StepDriver(make_runner(tiny_model), uses_steady=True)
    driver.add("r2", PROMPTS["r2"])
    driver.add("r3", PROMPTS["r3"], num_candidates=3, top_k=1, seed=5)
    driver.add("r4", PROMPTS["r4"])
    driver.step(r2=5, r3=len(PROMPTS["r3"]) - 2)
    for index in range(NUM_OUTPUT):
        counts = {name: request.num_tokens - request.num_computed for name, request in driver.requests.items()}
        output = driver.step(**counts)
        assert driver.sampled["r3"] == NO_TOKEN
        candidates = output.candidates["r3"]
        assert output.candidates.keys() == {"r3"}
        assert len(candidates.token_ids) == len(candidates.logprobs) == 3
        driver.choose("r3", candidates.token_ids[0])
        assert driver.requests["r3"].output == alone["r3"][: index + 1]
    for name in ("r2", "r4"):
        assert driver.requests[name].output == alone[name]


def test_candidates_are_those_of_the_logits(tiny_model):
    driver = StepDriver(make_runner(tiny_model))
    driver.add("a", PROMPTS["r3"])
    driver.add("b", PROMPTS["r3"], num_candidates=4, temperature=7.0)
    driver.add("c", PROMPTS["r5"], num_candidates=1000)
    output = driver.step(**{name: len(request.prompt) for name, request in driver.requests.items()})
    logprobs = driver.runner.sampler.logits[0].log_softmax(-1)
    best = logprobs.topk(4)
    assert output.candidates["b"].token_ids == best.indices.tolist()
    assert output.candidates["b"].logprobs == best.values.tolist()
    assert sorted(output.candidates["c"].token_ids) == list(range(VOCAB_SIZE))


def test_candidates_alone_and_with_a_row_that_fails(tiny_model):
    driver = StepDriver(make_runner(tiny_model))
    for name in ("r2", "r3"):
        driver.add(name, PROMPTS[name], num_candidates=2)
    first = driver.step(r2=len(PROMPTS["r2"]), r3=len(PROMPTS["r3"]))
    assert first.sampled_token_ids == [NO_TOKEN] * 2
    for name in ("r2", "r3"):
        driver.choose(name, first.candidates[name].token_ids[1])
    driver.runner.kv_cache[:, :, driver.requests["r2"].blocks[0]] = torch.nan
    second = driver.step(r2=1, r3=1)
    assert (second.errors, second.candidates.keys()) == ({"r2": ErrorCode.NUMERICAL_ERROR}, {"r3"})


def test_a_beam_goes_on_from_another_one(tiny_model, alone):
    """Its row is replaced by one with another table and other tokens."""
    driver = StepDriver(make_runner(tiny_model))
    for name in ("r2", "r3"):
        driver.add(name, PROMPTS[name], num_candidates=2)
    output = driver.step(r2=len(PROMPTS["r2"]), r3=len(PROMPTS["r3"]))
    driver.choose("r2", output.candidates["r2"].token_ids[0])
    source, target = driver.requests["r2"], driver.requests["r3"]
    target.prompt, target.output = source.prompt, list(source.output)
    target.blocks, target.num_computed, target.has_row = [*source.blocks[:4], 599], source.num_computed, False
    driver.copies = [(CopyKind.DEVICE, source.blocks[4], 599)]
    output = driver.step(r2=1, r3=1)
    assert output.candidates["r3"] == output.candidates["r2"]
    assert output.candidates["r3"].token_ids[0] == alone["r2"][1]
