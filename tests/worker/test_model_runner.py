"""Steps of every shape give each request what it would get alone, and nothing passes from one request to another."""

from __future__ import annotations

import pytest
import tiny_llama
import torch
from step_driver import StepDriver
from tiny_runner import MAX_NUM_SEQS, NUM_OUTPUT, PROMPTS, VOCAB_SIZE, make_runner, prompt_of, step_of

from octavo.protocol.engine_messages import ErrorCode
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import NO_TOKEN, CachedRequest, CopyKind, NewRequest


@pytest.mark.parametrize("uses_steady", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_sixteen_at_once_equal_alone(tiny_model, alone, chunk, block_size, uses_steady):
    driver = StepDriver(make_runner(tiny_model, block_size, 3000 // block_size), chunk, uses_steady)
    for request_id, prompt in PROMPTS.items():
        driver.add(request_id, prompt)
    assert driver.run_until(NUM_OUTPUT, chunk) == alone


@pytest.mark.parametrize("uses_steady", [False, True])
def test_prefill_and_decode_share_steps(tiny_model, alone, uses_steady):
    """Requests join one by one, so that most steps hold chunks of prompts and decodes side by side."""
    driver = StepDriver(make_runner(tiny_model), uses_steady=uses_steady)
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


def test_logits_have_the_same_bits_in_every_company(tiny_model):
    prompt = PROMPTS["r5"]
    lonely = StepDriver(make_runner(tiny_model))
    lonely.add("a", prompt)
    lonely.step(a=len(prompt))
    expected = lonely.runner.sampler.logits[0]

    crowd = StepDriver(make_runner(tiny_model), seed=3)
    crowd.add("b", PROMPTS["r9"])
    crowd.add("a", prompt)
    crowd.add("c", PROMPTS["r1"])
    crowd.step(b=11, a=len(prompt) - 3)
    crowd.step(c=len(PROMPTS["r1"]), b=5, a=3)
    actual = crowd.runner.sampler.logits[1]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("uses_steady", [False, True])
@pytest.mark.parametrize("when", [1, 4, 9])
def test_preempted_and_resumed_requests_go_on_as_before(tiny_model, alone, when, uses_steady):
    driver = StepDriver(make_runner(tiny_model), when, uses_steady)
    for request_id in ("r3", "r4", "r5"):
        driver.add(request_id, PROMPTS[request_id])
    driver.run_until(when, chunk=9)
    driver.preempt("r4")
    driver.run_until(NUM_OUTPUT, chunk=5)
    for request_id in ("r3", "r4", "r5"):
        assert driver.requests[request_id].output == alone[request_id]


def test_a_row_carries_nothing_over(tiny_model, alone):
    """Rows, blocks and everything else that the last holder left is poisoned before the next one comes."""
    driver = StepDriver(make_runner(tiny_model, num_blocks=60))
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


def test_sampled_tokens_depend_on_seed_and_position_only(tiny_model):
    """A request sampled at temperature 1 is the same alone, in company, and when it resumes after a preemption."""
    params = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    lonely = StepDriver(make_runner(tiny_model))
    lonely.add("a", PROMPTS["r4"], **params)
    expected = lonely.run_until(NUM_OUTPUT, chunk=200)["a"]

    crowd = StepDriver(make_runner(tiny_model), seed=1)
    for request_id in ("r1", "r2", "r8"):
        crowd.add(request_id, PROMPTS[request_id], temperature=1.5, seed=1)
    crowd.add("a", PROMPTS["r4"], **params)
    crowd.run_until(5, chunk=6)
    crowd.preempt("a")
    assert crowd.run_until(NUM_OUTPUT, chunk=7)["a"] == expected

    other = StepDriver(make_runner(tiny_model))
    other.add("a", PROMPTS["r4"], **{**params, "seed": 8})
    assert other.run_until(NUM_OUTPUT, chunk=200)["a"] != expected


def test_min_tokens_reaches_the_sampler_with_the_right_position(tiny_model, alone):
    first, second = alone["r7"][:2]
    assert first != second
    driver = StepDriver(make_runner(tiny_model))
    request = SamplingParams(max_tokens=9, min_tokens=1, temperature=0.0, stop_token_ids=(first, second))
    driver.add("r7", PROMPTS["r7"])
    driver.requests["r7"].params = request
    driver.step(r7=len(PROMPTS["r7"]))
    assert driver.sampled["r7"] not in (first, second)

    free = StepDriver(make_runner(tiny_model))
    free.add("r7", PROMPTS["r7"])
    free.requests["r7"].params = request
    free.requests["r7"].output = [first]
    assert free.step(r7=len(PROMPTS["r7"]) + 1).sampled_token_ids == [second]


@pytest.mark.parametrize("uses_steady", [False, True])
def test_a_request_with_nan_fails_alone(tiny_model, alone, uses_steady):
    driver = StepDriver(make_runner(tiny_model), uses_steady=uses_steady)
    for request_id in ("r2", "r3", "r4"):
        driver.add(request_id, PROMPTS[request_id])
    driver.run_until(3, chunk=200)
    driver.runner.kv_cache[:, :, driver.requests["r3"].blocks[0]] = torch.nan
    output = driver.step(r2=1, r3=1, r4=1)
    assert output.errors == {"r3": ErrorCode.NUMERICAL_ERROR}
    assert driver.sampled["r3"] == NO_TOKEN

    driver.drop("r3")  # its blocks, NaN and all, go to a newcomer
    driver.add("r6", PROMPTS["r6"])
    driver.run_until(NUM_OUTPUT, chunk=9)
    for request_id in ("r2", "r4", "r6"):
        assert driver.requests[request_id].output == alone[request_id]


@pytest.mark.parametrize("is_steady", [False, True])
def test_a_failed_row_keeps_its_place_in_later_results(tiny_model, alone, is_steady):
    """Steps that were on the way count it as going on; and it is reported once, whatever its logits say later."""
    runner = make_runner(tiny_model)
    names = ["r0", "r1", "r2"]
    params = SamplingParams(max_tokens=20, temperature=0.0)
    new = [NewRequest(n, PROMPTS[n], [], params, list(range(i * 20, i * 20 + 20)), 0) for i, n in enumerate(names)]
    runner.execute(step_of(0, new_requests=new, num_scheduled_tokens={n: len(PROMPTS[n]) for n in names}))
    runner.sampler.row_to_spoil = 1
    one_each = {"num_scheduled_tokens": dict.fromkeys(names, 1)}
    first = runner.execute(step_of(1, **({"steady_joined": names} if is_steady else one_each)))
    assert first.errors == {"r1": ErrorCode.NUMERICAL_ERROR}
    assert first.sampled_token_ids == [alone["r0"][1], NO_TOKEN, alone["r2"][1]]

    for index in (2, 3):
        later = runner.execute(step_of(index, **({} if is_steady else one_each)))
        assert later.sampled_token_ids == [alone["r0"][index], NO_TOKEN, alone["r2"][index]]
        assert later.errors == {}

    new_again = NewRequest("r1", PROMPTS["r1"], [], params, list(range(20, 40)), 0)
    again = step_of(4, new_requests=[new_again], num_scheduled_tokens={"r1": len(PROMPTS["r1"])})
    assert runner.execute(again).sampled_token_ids[-1] == alone["r1"][0]


def test_the_worker_feeds_itself_the_sampled_token(tiny_model, alone):
    """Two steps in flight: the second names no token, and none has to come back first."""
    runner = make_runner(tiny_model)
    prompt = PROMPTS["r2"]
    params = SamplingParams(max_tokens=9, temperature=0.0)
    new = NewRequest("r2", prompt, [], params, [5, 3, 9, 1, 7, 2, 8], 0)
    steps = (
        step_of(0, new_requests=[new], num_scheduled_tokens={"r2": len(prompt)}),
        step_of(1, num_scheduled_tokens={"r2": 1}),
        step_of(2, steady_joined=["r2"]),
        step_of(3),
    )
    assert [runner.execute(step).sampled_token_ids for step in steps] == [[token] for token in alone["r2"][:4]]


def test_a_step_may_follow_the_last_token_that_fits(tiny_model):
    """With two steps in flight the last token may be sampled while the next step is already on its way."""
    driver = StepDriver(make_runner(tiny_model))
    driver.add("a", prompt_of(tiny_llama.MAX_MODEL_LEN - 1, 1))
    driver.step(a=tiny_llama.MAX_MODEL_LEN - 1)
    driver.step(a=1)
    assert driver.requests["a"].num_tokens == tiny_llama.MAX_MODEL_LEN + 1


def test_a_step_without_tokens_only_drops(tiny_model):
    driver = StepDriver(make_runner(tiny_model))
    driver.add("a", [1, 2])
    driver.step(a=2)
    driver.drop("a")
    assert driver.step().sampled_token_ids == []
    assert driver.runner.states.rows == {}
    assert len(driver.runner.states.free_rows) == MAX_NUM_SEQS


def test_only_sampled_rows_pass_through_the_head(tiny_model):
    driver = StepDriver(make_runner(tiny_model))
    for request_id in ("r2", "r3"):
        driver.add(request_id, PROMPTS[request_id])
    driver.step(r2=len(PROMPTS["r2"]), r3=4)
    assert driver.runner.sampler.logits.shape == (1, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("changes", "problem", "words"),
    [
        ({"num_scheduled_tokens": {"nobody": 1}}, KeyError, "nobody"),
        ({"cached_requests": [CachedRequest("nobody", [1])]}, KeyError, "nobody"),
        ({"steady_left": ["nobody"]}, KeyError, "nobody"),
        ({"steady_joined": ["nobody"]}, KeyError, "nobody"),
        ({"copies": [(CopyKind.SWAP_OUT, 1, 0)]}, ValueError, "0 host blocks"),
        ({"copies": [(CopyKind.SWAP_IN, 0, 1)]}, ValueError, "0 host blocks"),
        ({"copies": [(CopyKind.DEVICE, 600, 1)]}, ValueError, "600 device blocks"),
        ({"copies": [(CopyKind.DEVICE, 1, -1)]}, ValueError, "block 1 to -1"),
        ({"num_scheduled_tokens": {"steady": 1}}, ValueError, "request steady is steady, and scheduled by name"),
        ({"steady_joined": ["steady"]}, ValueError, "request steady cannot join"),
        ({"steady_joined": ["other", "other"]}, ValueError, "request other cannot join"),
        ({"steady_left": ["other"]}, ValueError, "request other cannot leave"),
        (
            {"steady_joined": ["behind"]},
            ValueError,
            "steady request behind: step reaches token 4 with 1, but there are 5",
        ),
        (
            {"steady_joined": ["ahead"]},
            ValueError,
            "steady request ahead: step reaches token 6 with 1, but there are 5",
        ),
        ({"cached_requests": [CachedRequest("other", [], [7])]}, ValueError, "request other gets a token"),
        ({"num_scheduled_tokens": {"other": 0}}, ValueError, "request other: step reaches token 5 with 0"),
        ({"num_scheduled_tokens": {"behind": 3}}, ValueError, "request behind: step reaches token 6 with 3"),
    ],
)
def test_a_step_that_does_not_fit_the_rows_is_an_error(tiny_model, changes, problem, words):
    runner = make_runner(tiny_model)
    params = SamplingParams(max_tokens=9)
    computed = {"steady": 4, "other": 4, "behind": 3, "ahead": 4}
    listing = SamplingParams(max_tokens=9, num_candidates=1)
    new = [
        NewRequest(name, [1, 2, 3, 4, 5], [], listing if name == "ahead" else params, [2 * i, 2 * i + 1], num_computed)
        for i, (name, num_computed) in enumerate(computed.items())
    ]
    # The one that lists candidates does not get the token that it has to be told.
    runner.execute(
        step_of(0, new_requests=new, steady_joined=["steady"], num_scheduled_tokens={"ahead": 1, "other": 1})
    )
    with pytest.raises(problem, match=words):
        runner.execute(step_of(1, **changes))


@pytest.mark.parametrize(("num_blocks", "num_scheduled"), [(1, 5), (2, 6)])
def test_a_step_past_the_tokens_or_blocks_of_a_request_is_an_error(tiny_model, num_blocks, num_scheduled):
    new = NewRequest("a", [1, 2, 3, 4, 5], [], SamplingParams(max_tokens=3), list(range(num_blocks)), 0)
    with pytest.raises(ValueError, match="request a: step reaches token"):
        make_runner(tiny_model).execute(step_of(new_requests=[new], num_scheduled_tokens={"a": num_scheduled}))
