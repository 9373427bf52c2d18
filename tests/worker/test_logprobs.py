"""Logprobs of output tokens: raw, of the drawn token and the likeliest, whatever else the row or the step does."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from model_logits import all_logits
from step_driver import StepDriver
from tiny_runner import PROMPTS, VOCAB_SIZE, launch_ahead, make_runner, step_of

from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.protocol.engine_messages import ErrorCode
from octavo.protocol.logprobs import NO_ENTRY, TokenLogprobs
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import CachedRequest
from octavo.worker.logprobs import PackedRows, RawRows, RowLogprobs

NUM_TOKENS = 5
EDITS = {"allowed_token_ids": (2, 4, 6), "repetition_penalty": 2.0, "logit_bias": ((4, 5.0),), "temperature": 3.0}


def only_row(packed: TokenLogprobs) -> tuple[list[int], list[float]]:
    ((token_ids, logprobs),) = packed.rows()
    return token_ids, logprobs


def expected_row(model, context: list[int], token_id: int, num_listed: int) -> tuple[list[int], list[float]]:
    """In the order and with the bits of `likeliest_tokens`."""
    listed_ids, listed = likeliest_tokens(all_logits(model, context)[-1:], VOCAB_SIZE)
    own = listed[0][listed_ids[0].tolist().index(token_id)].item()
    return [token_id, *listed_ids[0, :num_listed].tolist()], [own, *listed[0, :num_listed].tolist()]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3, "top_k": 2}, EDITS], ids=["greedy", "", "all"])
@pytest.mark.parametrize("uses_steady", [False, True])
def test_each_row_gets_what_it_asks_for_of_the_models_own_distribution(tiny_model, options, uses_steady):
    """Beside rows that report nothing, and one that lists candidates."""
    driver = StepDriver(make_runner(tiny_model), uses_steady=uses_steady)
    driver.add("plain", PROMPTS["r2"], **options)
    driver.add("beam", PROMPTS["r2"], num_candidates=2)
    asked = {"own": 0, "few": 3, "most": 20}
    for name, num_listed in asked.items():
        driver.add(name, PROMPTS[f"r{num_listed % 7}"], num_logprobs=num_listed, **options)
    for _ in range(NUM_TOKENS):
        contexts = {name: each.prompt + each.output for name, each in driver.requests.items()}
        output = driver.step(**{name: each.num_tokens - each.num_computed for name, each in driver.requests.items()})
        driver.choose("beam", output.candidates["beam"].token_ids[0])
        assert output.logprobs.keys() == asked.keys()
        for name, num_listed in asked.items():
            found = only_row(output.logprobs[name])
            assert found == expected_row(tiny_model, contexts[name], driver.sampled[name], num_listed)


def test_one_step_ahead_they_are_the_same(tiny_model):
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, num_logprobs=2, frequency_penalty=2.0)
    results = launch_ahead(make_runner(tiny_model), NUM_TOKENS, a=(PROMPTS["r3"], params))
    context = list(PROMPTS["r3"])
    for result in results:
        (token_id,) = result.sampled_token_ids
        assert only_row(result.logprobs["a"]) == expected_row(tiny_model, context, token_id, 2)
        context.append(token_id)


def test_a_row_that_fails_reports_nothing_now_or_later(tiny_model):
    driver = StepDriver(make_runner(tiny_model))
    for name in ("r2", "r3", "r4"):
        options = {"allowed_token_ids": (VOCAB_SIZE,)} if name == "r4" else {}
        driver.add(name, PROMPTS[name], num_logprobs=1, **options)
    driver.step(r3=len(PROMPTS["r3"]) - 1)
    driver.runner.kv_cache[:, :, driver.requests["r3"].blocks[0]] = torch.nan
    output = driver.step(r2=len(PROMPTS["r2"]), r3=1, r4=len(PROMPTS["r4"]))
    assert output.errors == {"r3": ErrorCode.NUMERICAL_ERROR, "r4": ErrorCode.NOTHING_ALLOWED}
    assert output.logprobs.keys() == {"r2"}
    blocks = CachedRequest("r3", [driver.free_blocks.pop()])
    later = driver.runner.execute(step_of(9, cached_requests=[blocks], num_scheduled_tokens={"r2": 1, "r3": 1}))
    assert (later.errors, later.logprobs.keys()) == ({}, {"r2"})


def test_a_step_in_which_nobody_asks_finds_none(tiny_model, monkeypatch):
    runner = make_runner(tiny_model)
    monkeypatch.setattr(RawRows, "__init__", lambda *args: pytest.fail("logprobs are found"))
    driver = StepDriver(runner)
    driver.add("r2", PROMPTS["r2"])
    driver.step(r2=len(PROMPTS["r2"]))


def test_rows_are_kept_as_they_were_for_the_token_that_comes_later():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    before, rows = logits.clone(), torch.tensor([3, 1])
    kept = RawRows(logits[rows], 2)
    logits.fill_(7.0)
    found = kept.logprobs_of(torch.tensor([5, 6]))
    expected = RawRows(before, 2, rows).logprobs_of(torch.tensor([5, 6]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert torch.equal(found.own, before.log_softmax(-1)[rows, torch.tensor([5, 6])])


def test_rows_have_as_many_entries_as_were_asked_for_also_when_there_are_fewer_tokens():
    found = RowLogprobs(torch.tensor([-0.5]), torch.tensor([[1, 0]]), torch.tensor([[-0.5, -1.0]]))
    packed = PackedRows(np.array([1]), found, 4).pack(0, 1, 4)
    assert only_row(packed) == ([1, 1, 0, NO_ENTRY, NO_ENTRY], [-0.5, -0.5, -1.0, -math.inf, -math.inf])
    assert only_row(PackedRows(np.array([1]), found._replace(token_ids=None), 0).pack(0, 1, 0)) == ([1], [-0.5])
