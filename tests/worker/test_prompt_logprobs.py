"""Logprobs of prompt tokens: the same bits in any chunks and any company, a few rows at a time."""

from __future__ import annotations

import pytest
import torch
from model_logits import all_logits
from step_driver import StepDriver
from tiny_runner import PROMPTS, VOCAB_SIZE, make_runner, prompt_of

from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.protocol.logprobs import TokenLogprobs
from octavo.worker.prompt_logprobs import ROWS_AT_A_TIME

LONG = prompt_of(150, 3)


def expected_rows(model, prompt: list[int], num_listed: int) -> list[tuple[list[int], list[float]]]:
    ids, logprobs = likeliest_tokens(all_logits(model, prompt)[:-1], VOCAB_SIZE)
    rows = []
    for token_id, row_ids, row in zip(prompt[1:], ids.tolist(), logprobs.tolist(), strict=True):
        rows.append(([token_id, *row_ids[:num_listed]], [row[row_ids.index(token_id)], *row[:num_listed]]))
    return rows


def collect(driver: StepDriver, name: str, chunk: int) -> TokenLogprobs:
    """Step until the request has a token; its chunks have to follow each other from position 1."""
    found, request = None, driver.requests[name]
    while not request.output:
        counts = {key: min(chunk, each.num_tokens - each.num_computed) for key, each in driver.requests.items()}
        more = driver.step(**counts).prompt_logprobs.get(name)
        if more is not None:
            assert more.first_position == 1 + (0 if found is None else found.num_rows)
            found = more.rows if found is None else found.joined(more.rows)
    assert found is not None
    return found


@pytest.mark.parametrize("num_listed", [0, 2])
@pytest.mark.parametrize("chunk", [1, 5, 64, 65, 200])
def test_any_chunks_give_the_same_bits_beside_others(tiny_model, chunk, num_listed):
    driver = StepDriver(make_runner(tiny_model))
    driver.add("decoding", PROMPTS["r3"])
    driver.step(decoding=len(PROMPTS["r3"]))
    driver.add("other", PROMPTS["r5"], num_prompt_logprobs=20)
    driver.add("a", LONG, num_prompt_logprobs=num_listed)
    found = collect(driver, "a", chunk)
    assert found.num_listed == num_listed
    assert list(found.rows()) == expected_rows(tiny_model, LONG, num_listed)


def test_requests_of_one_step_get_their_own(tiny_model):
    driver = StepDriver(make_runner(tiny_model))
    asked = {"r3": 0, "r5": 20, "r6": 1}
    driver.add("plain", PROMPTS["r4"])
    for name, num_listed in asked.items():
        driver.add(name, PROMPTS[name], num_prompt_logprobs=num_listed)
    output = driver.step(**{name: len(each.prompt) for name, each in driver.requests.items()})
    assert output.prompt_logprobs.keys() == asked.keys()
    for name, num_listed in asked.items():
        assert list(output.prompt_logprobs[name].rows.rows()) == expected_rows(tiny_model, PROMPTS[name], num_listed)


def test_decoding_and_what_was_computed_before_report_nothing(tiny_model):
    driver = StepDriver(make_runner(tiny_model))
    driver.add("a", PROMPTS["r3"], num_prompt_logprobs=1)
    driver.step(a=len(PROMPTS["r3"]))
    assert driver.step(a=1).prompt_logprobs == {}
    driver.preempt("a")
    driver.step(a=5)
    found = driver.step(a=driver.requests["a"].num_tokens - 5).prompt_logprobs["a"]
    assert (found.first_position, found.rows.num_rows) == (6, len(PROMPTS["r3"]) - 6)


@pytest.mark.parametrize("prompt", [[3], [3, 4]])
def test_the_first_token_has_none(tiny_model, prompt):
    driver = StepDriver(make_runner(tiny_model))
    driver.add("a", prompt, num_prompt_logprobs=1)
    found = driver.step(a=len(prompt)).prompt_logprobs
    assert [each.rows.num_rows for each in found.values()] == [1] * (len(prompt) - 1)


def test_few_rows_at_a_time_go_through_the_head(tiny_model, monkeypatch):
    """So the memory for their logits does not depend on the prompt."""
    nums_rows = []
    compute_logits = tiny_model.compute_logits

    def count_rows(hidden: torch.Tensor) -> torch.Tensor | None:
        nums_rows.append(len(hidden))
        return compute_logits(hidden)

    monkeypatch.setattr(tiny_model, "compute_logits", count_rows)
    driver = StepDriver(make_runner(tiny_model))
    for name in "ab":
        driver.add(name, LONG, num_prompt_logprobs=0)
    driver.step(a=150, b=120)
    assert ROWS_AT_A_TIME == 64
    assert nums_rows == [1, 64, 64, 64, 64, 149 + 120 - 4 * 64]
