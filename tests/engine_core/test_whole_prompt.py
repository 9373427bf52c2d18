"""Requests that report their prompt's logprobs: each row once, in order, whatever was cached, preempted or shared."""

from __future__ import annotations

import msgspec
import pytest
from oracle_logprobs import expected_logprobs
from scheduler_harness import SchedulerHarness, make_config

from octavo.engine_core.invariants import InvariantError
from octavo.engine_core.request import RequestStatus
from octavo.protocol.codec import decode_worker_event
from octavo.protocol.config import PreemptionMode
from octavo.protocol.engine_messages import AddRequest, ErrorCode, FinishReason
from octavo.protocol.logprobs import PromptLogprobs
from octavo.protocol.sampling_params import NO_LOGPROBS, SamplingParams
from octavo.protocol.worker_messages import NO_TOKEN, ModelRunnerOutput

BLOCK = 4
PROMPT = list(range(100, 118))


def harness_with(**config):
    return SchedulerHarness(make_config(**{"eos_token_ids": (), "block_size": BLOCK, **config}))


def asking(request_id, prompt=PROMPT, arrival_time_s=0.0, *, max_tokens=3, num_prompt_logprobs=2, **fields):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, num_prompt_logprobs=num_prompt_logprobs)
    return AddRequest(request_id, list(prompt), params, arrival_time_s, **fields)


def deliver_one(harness):
    harness.schedule()
    harness.deliver()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("chunk", [None, 1, 5])
def test_nothing_is_taken_from_the_cache_and_everything_may_be_taken_from_it(chunk, max_steps_in_flight):
    harness = harness_with(max_tokens_per_request=chunk, max_steps_in_flight=max_steps_in_flight)
    harness.new("before", PROMPT, max_tokens=2)
    harness.run()
    log = harness.add(asking("a"))
    harness.run()
    after = harness.new("after", PROMPT, max_tokens=2)
    harness.run()
    harness.check_outputs()
    assert log.prompt_logprobs.num_rows == len(PROMPT) - 1
    assert (log.num_cached_tokens, after.num_cached_tokens) == (0, 16)
    assert harness.scheduler.stats().num_cached_tokens == 16


def test_chunks_come_in_several_outputs_before_the_first_token():
    harness = harness_with(max_tokens_per_request=7, max_steps_in_flight=1)
    log = harness.add(asking("a"))
    found = []
    while not log.output_token_ids:
        deliver_one(harness)
        found.append(log.prompt_logprobs.num_rows)
    assert found == [7, 14, 17]


def test_a_prompt_of_one_token_has_nothing_to_report():
    harness = harness_with()
    log = harness.add(asking("a", [5]))
    assert not harness.scheduler.requests["a"].needs_whole_prompt
    harness.run()
    assert (log.prompt_logprobs, log.finish_reason) == (None, FinishReason.LENGTH)
    harness.check_outputs()


def test_a_request_that_ends_with_its_first_token_has_its_prompt_before():
    harness = harness_with()
    log = harness.add(asking("a", max_tokens=1))
    harness.run()
    assert log.prompt_logprobs == expected_logprobs(PROMPT, 1, 2, 10_007)


def test_it_does_not_wait_for_a_beginning_that_another_one_computes():
    harness = harness_with(max_tokens_per_request=BLOCK - 1)
    harness.new("maker", PROMPT, max_tokens=2)
    harness.add(asking("a", arrival_time_s=1.0))
    assert harness.schedule().num_scheduled_tokens == {"maker": 3, "a": 3}


def test_others_wait_for_what_it_computes():
    harness = harness_with(max_tokens_per_request=4)
    harness.add(asking("a"))
    log = harness.new("b", PROMPT, 1.0, max_tokens=2)
    assert harness.schedule().num_scheduled_tokens == {"a": 4}
    harness.run()
    assert log.num_cached_tokens == 16


def preempted_after(num_steps, mode, num_host_blocks):
    """A request of which so many chunks of 4 have run, then all of its blocks are taken."""
    harness = harness_with(
        max_tokens_per_request=4, max_steps_in_flight=1, preemption_mode=mode, num_host_blocks=num_host_blocks
    )
    log = harness.add(asking("a"))
    for _ in range(num_steps):
        deliver_one(harness)
    request = harness.scheduler.requests["a"]
    harness.scheduler.preemption.preempt(request)
    harness.check_state()
    return harness, log, request


def test_what_is_computed_again_is_reported_once():
    harness, log, request = preempted_after(2, PreemptionMode.RECOMPUTE, 0)
    assert (log.prompt_logprobs.num_rows, request.num_prompt_logprobs_left) == (8, 9)
    step = harness.schedule()
    assert step.new_requests[0].num_computed_tokens == 0
    assert step.new_requests[0].sampling_params.num_prompt_logprobs == 2
    harness.run()
    harness.check_outputs()


def test_what_was_swapped_is_not_computed_again():
    harness, _, request = preempted_after(2, PreemptionMode.SWAP, 20)
    assert request.status is RequestStatus.SWAPPED
    assert harness.schedule().new_requests[0].num_computed_tokens == 8
    harness.run()
    harness.check_outputs()


def test_with_all_reported_it_is_a_request_like_any_other():
    harness, log, request = preempted_after(5, PreemptionMode.RECOMPUTE, 0)
    assert log.prompt_logprobs.num_rows == 17
    assert not request.needs_whole_prompt
    step = harness.schedule()
    assert step.new_requests[0].num_computed_tokens == 16
    assert step.new_requests[0].sampling_params.num_prompt_logprobs == NO_LOGPROBS
    harness.run()
    harness.check_outputs()


def test_a_fork_shares_the_prompt_of_the_choice_that_reports_it():
    harness = harness_with(max_tokens_per_request=6)
    harness.add(asking("a"))
    params = SamplingParams(max_tokens=3, seed=4, choice_index=1)
    fork = harness.add(AddRequest("b", PROMPT, params, 0.0, fork_of="a"))
    harness.run()
    harness.check_outputs()
    assert fork.num_cached_tokens == len(PROMPT) - 1


def test_what_comes_for_a_request_that_is_gone_is_dropped():
    harness = harness_with()
    harness.add(asking("a"))
    harness.schedule()
    harness.abort(["a"])
    harness.deliver()


def test_a_request_sent_again_with_its_output_reports_its_prompt_again():
    harness = harness_with()
    log = harness.add(asking("a"))
    deliver_one(harness)
    assert len(log.output_token_ids) == 1
    harness.restart()
    harness.run()
    harness.check_outputs()


def test_a_gap_is_a_defect():
    harness = harness_with()
    harness.add(asking("a"))
    step = harness.schedule()
    rows = expected_logprobs(PROMPT, 3, 2, 10_007)
    with pytest.raises(InvariantError, match="a: no logprobs of prompt token 1"):
        harness.scheduler.update(ModelRunnerOutput(step.step_id, [7], prompt_logprobs={"a": PromptLogprobs(3, rows)}))


@pytest.mark.parametrize("error", [ErrorCode.NOTHING_ALLOWED, ErrorCode.NUMERICAL_ERROR])
def test_a_request_that_fails_says_why_and_nothing_else(error):
    harness = harness_with()
    harness.add(asking("a", arrival_time_s=1.0))
    harness.new("b", [9, 8], max_tokens=2)
    harness.schedule()
    result = decode_worker_event(harness.results.popleft())
    result = msgspec.structs.replace(result, sampled_token_ids=[5, NO_TOKEN], errors={"a": error})
    assert result.prompt_logprobs.keys() == {"a"}
    failed, other = harness.scheduler.update(result)
    assert (failed.request_id, failed.finish_reason, failed.error) == ("a", FinishReason.ERROR, error)
    assert (failed.token_ids, failed.prompt_logprobs) == ([], None)
    assert (other.request_id, other.token_ids) == ("b", [5])


def test_logprobs_go_with_the_tokens_that_they_belong_to_and_no_others():
    harness = harness_with(max_steps_in_flight=2)
    plain = harness.new("plain", [1, 2], max_tokens=5)
    log = harness.new("a", [3, 4], 1.0, max_tokens=5, num_logprobs=1)
    harness.run()
    harness.check_outputs()
    assert (plain.logprobs, log.logprobs.num_rows) == (None, 5)
