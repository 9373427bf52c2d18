"""What the scheduler promises, one scenario at a time."""

import pytest
from scheduler_harness import SchedulerHarness, expected, make_config, make_scheduler

from octavo.engine_core.invariants import InvariantError
from octavo.engine_core.kv_cache_manager import NO_PREFIX
from octavo.engine_core.request import Request, RequestStatus
from octavo.engine_core.scheduler import UnexpectedResultError
from octavo.protocol.codec import encode
from octavo.protocol.engine_messages import AddRequest, ErrorCode, FinishReason
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import NO_TOKEN, ModelRunnerOutput


def harness_with(**config):
    """Without end and without prefix cache, so that the steps are easy to foretell."""
    return SchedulerHarness(make_config(**{"eos_token_ids": (), "enable_prefix_caching": False, **config}))


def add(scheduler, request_id="a", prompt=(5, 6, 7), **params):
    return scheduler.add(AddRequest(request_id, list(prompt), SamplingParams(**{"max_tokens": 8, **params}), 0.0))


def make_request(command):
    return Request(command, (0, command.arrival_time_s, 1, 0), make_config().model, b"root")


def step_and_answer(scheduler, token_id):
    """One plain step in which every request samples `token_id`."""
    step = scheduler.schedule()
    return scheduler.update(ModelRunnerOutput(step.step_id, [token_id] * len(scheduler.steps_in_flight[-1].sampling)))


def scheduled(step, harness):
    """Tokens by request: one for each steady one, and what the step says of the others."""
    return dict.fromkeys(harness.scheduler.steady.members, 1) | step.num_scheduled_tokens


def test_chunks_then_decode_are_one_equation():
    harness = harness_with(max_num_batched_tokens=4)
    harness.new("a", range(10), max_tokens=3)
    num_tokens = []
    while (step := harness.schedule()) is not None:
        num_tokens.append(scheduled(step, harness)["a"])
        harness.deliver()
    assert num_tokens == [4, 4, 2, 1, 1]
    harness.check_outputs()


def test_decodes_and_chunks_share_a_step_and_its_budget():
    harness = harness_with(max_num_batched_tokens=8, max_tokens_per_request=5, max_steps_in_flight=1)
    harness.new("old", range(4), arrival_time_s=0, max_tokens=9)
    harness.schedule()
    harness.deliver()
    harness.new("long", range(20), arrival_time_s=1, max_tokens=9)
    harness.new("next", range(20), arrival_time_s=2, max_tokens=9)
    assert scheduled(harness.schedule(), harness) == {"old": 1, "long": 5, "next": 2}


def test_the_second_step_goes_out_before_the_first_result():
    harness = harness_with()
    log = harness.new("a", range(3), max_tokens=2)
    assert scheduled(harness.schedule(), harness) == {"a": 3}
    step = harness.schedule()
    assert (step.steady_joined, step.num_scheduled_tokens) == (["a"], {})
    assert harness.schedule() is None, "its last token is pending"
    harness.deliver()
    assert len(log.output_token_ids) == 1
    harness.deliver()
    assert log.finish_reason is FinishReason.LENGTH


def test_a_step_too_many_is_dropped_when_the_request_has_stopped():
    """With EOS at the first token, the step that was sent ahead computed for nothing."""
    config = make_config()
    prompt = next([n, 1] for n in range(10_000) if expected(config, AddRequest("a", [n, 1], STOPPER, 0))[0] == [2])
    harness = SchedulerHarness(config)
    log = harness.add(AddRequest("a", prompt, STOPPER, 0.0))
    harness.schedule()
    harness.schedule()
    harness.deliver()
    assert (log.output_token_ids, log.finish_reason) == ([2], FinishReason.STOP)
    harness.deliver()
    harness.scheduler.check_idle()


STOPPER = SamplingParams(max_tokens=50, temperature=0.0)


def test_rows_are_dropped_with_the_next_step():
    harness = harness_with(max_steps_in_flight=1)
    harness.new("a", range(3), max_tokens=5)
    harness.schedule()
    harness.deliver()
    harness.abort(["a"])
    assert harness.scheduler.kv_cache_manager.num_used_blocks == 0
    assert harness.schedule() is None
    harness.new("a", range(3), max_tokens=1)
    step = harness.schedule()
    assert step.dropped_request_ids == ["a"]
    assert [new.request_id for new in step.new_requests] == ["a"]
    harness.run()
    harness.check_outputs()


def test_a_token_of_an_aborted_request_does_not_reach_its_namesake():
    harness = harness_with()
    harness.new("a", range(3), max_tokens=5)
    harness.schedule()
    harness.abort(["a"])
    log = harness.new("a", [9, 9], max_tokens=5)
    harness.deliver()
    assert log.output_token_ids == []
    harness.run()
    harness.check_outputs()


def test_a_preempted_request_still_gets_the_token_in_flight():
    harness = harness_with(block_size=1, num_device_blocks=12)
    old = harness.new("old", range(4), arrival_time_s=0, max_tokens=8)
    young = harness.new("young", range(4), arrival_time_s=1, max_tokens=8)
    while harness.scheduler.counters.num_preemptions == 0:
        if harness.can_schedule():
            harness.schedule()
        else:
            harness.deliver()
    (request,) = harness.scheduler.waiting.members.values()
    assert request.request_id == "young"
    assert request.num_pending_tokens == 1
    num_tokens = len(young.output_token_ids)
    while request.num_pending_tokens:
        harness.deliver()
    assert len(young.output_token_ids) == num_tokens + 1
    harness.run()
    assert old.finish_reason is young.finish_reason is FinishReason.LENGTH
    harness.check_outputs()


def test_a_request_whose_token_is_in_flight_is_not_admitted_before_it_arrives():
    """`old` needs no more steps, `young` finds no block and preempts itself; then `old` is gone and there is room."""
    harness = harness_with(block_size=1, num_device_blocks=8)
    harness.new("old", [1, 2, 3], arrival_time_s=0, max_tokens=2)
    harness.new("young", [4, 5, 6], arrival_time_s=1, max_tokens=5)
    harness.schedule()
    harness.schedule()
    harness.deliver()
    assert harness.schedule() is None
    assert list(harness.scheduler.waiting.members) == ["young"]
    harness.abort(["old"])
    assert harness.scheduler.requests["young"].num_pending_tokens == 1
    assert harness.schedule() is None
    harness.deliver()
    assert harness.schedule().num_scheduled_tokens == {"young": 5}
    harness.run()
    harness.check_outputs()


def test_a_step_that_preempts_admits_nobody():
    """`middle` waits for more blocks than are free; the preemption of `young` makes room for it, in the next step."""
    harness = harness_with(block_size=1, num_device_blocks=16, max_steps_in_flight=1)
    harness.new("old", [1, 2], arrival_time_s=0, max_tokens=15)
    harness.new("young", [3, 4], arrival_time_s=9, max_tokens=15)
    while harness.scheduler.kv_cache_manager.num_free_blocks > 6:
        harness.schedule()
        harness.deliver()
    harness.new("middle", range(4), arrival_time_s=5, max_tokens=2)
    while harness.scheduler.counters.num_preemptions == 0:
        step = harness.schedule()
        harness.deliver()
        assert step.new_requests == []
    assert [new.request_id for new in harness.schedule().new_requests] == ["middle"]
    harness.run()
    harness.check_outputs()


def test_a_step_is_a_value_that_later_steps_do_not_change():
    harness = harness_with(block_size=1, max_steps_in_flight=1)
    harness.new("a", [1, 2], max_tokens=5)
    step = harness.schedule()
    frame = encode(step)
    harness.run()
    assert encode(step) == frame


def test_an_older_request_that_comes_later_runs_before_younger_ones():
    harness = harness_with(max_steps_in_flight=1)
    harness.new("young", range(4), arrival_time_s=5, max_tokens=8)
    harness.schedule()
    harness.deliver()
    harness.new("old", range(4), arrival_time_s=1, max_tokens=8)
    harness.schedule()
    assert [request.request_id for request in harness.scheduler.running] == ["old", "young"]
    harness.deliver()
    assert scheduled(harness.schedule(), harness) == {"young": 1, "old": 1}


@pytest.mark.parametrize(
    ("params", "sampled", "ends"),
    [
        ({}, [9, 2], (FinishReason.STOP, 2)),
        ({"ignore_eos": True, "max_tokens": 3}, [2, 2, 2], (FinishReason.LENGTH, None)),
        ({"stop_token_ids": (7,)}, [9, 7], (FinishReason.STOP, 7)),
        ({"stop_token_ids": (7,), "ignore_eos": True}, [2, 7], (FinishReason.STOP, 7)),
        ({"min_tokens": 2}, [2, 7, 2], (FinishReason.STOP, 2)),
        ({"min_tokens": 1, "stop_token_ids": (7,)}, [7, 7], (FinishReason.STOP, 7)),
        ({"max_tokens": 2}, [9, 2], (FinishReason.STOP, 2)),
        ({"max_tokens": 2}, [9, 9], (FinishReason.LENGTH, None)),
    ],
)
def test_ends_of_a_request(params, sampled, ends):
    scheduler = make_scheduler(make_config(max_steps_in_flight=1))
    add(scheduler, **params)
    for index, token_id in enumerate(sampled):
        (output,) = step_and_answer(scheduler, token_id)
        assert (output.first_index, output.token_ids) == (index, [token_id])
        if index < len(sampled) - 1:
            assert output.finish_reason is None
    assert (output.finish_reason, output.stop_token_id) == ends
    scheduler.check_idle()


def test_a_full_context_ends_a_request():
    harness = harness_with(max_model_len=10)
    log = harness.new("a", range(7), max_tokens=100)
    harness.run()
    assert (len(log.output_token_ids), log.finish_reason) == (3, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "fits"),
    [(9, 4, True), (9, 5, False), (1, 12, True), (12, 1, True), (12, 2, False)],
)
def test_a_request_fits_to_the_last_slot_or_is_refused_at_once(num_prompt_tokens, max_tokens, fits):
    """Three blocks of four slots; the last token of a request needs none."""
    harness = harness_with(block_size=4, num_device_blocks=3)
    log = harness.new("a", range(num_prompt_tokens), max_tokens=max_tokens)
    if fits:
        harness.run()
        assert len(log.output_token_ids) == max_tokens
    else:
        assert (log.finish_reason, log.error) == (FinishReason.ERROR, ErrorCode.NEVER_FITS)
        assert log.error_message == (
            f"prompt and output may have {num_prompt_tokens + max_tokens} tokens ({num_prompt_tokens} of prompt); "
            "they need 4 blocks of 4 tokens, and there are 3"
        )
        harness.scheduler.check_idle()


def test_a_prompt_that_fills_the_context_has_one_token_of_output():
    harness = harness_with(max_model_len=10)
    full, nearly_full = harness.new("a", range(10), max_tokens=5), harness.new("b", range(9), max_tokens=5)
    harness.run()
    assert [len(log.output_token_ids) for log in (full, nearly_full)] == [1, 1]
    too_long = harness.new("c", range(11), max_tokens=1)
    assert too_long.error is ErrorCode.NEVER_FITS
    assert too_long.error_message == "the prompt has 11 tokens; the context has room for 10"


@pytest.mark.parametrize(
    ("prompt", "output", "arrival_time_s", "field"),
    [
        ([], [], 0.0, "prompt"),
        ([5, 10_007], [], 0.0, "prompt_token_ids"),
        ([-1, 5], [], 0.0, "prompt_token_ids"),
        ([5], [2**40], 0.0, "output_token_ids"),
        ([5], [-7], 0.0, "output_token_ids"),
        ([5], [], float("nan"), "arrival_time_s"),
        ([5], [], float("inf"), "arrival_time_s"),
    ],
)
def test_a_malformed_request_fails_alone(prompt, output, arrival_time_s, field):
    scheduler = make_scheduler(make_config())
    answer = scheduler.add(AddRequest("a", prompt, SamplingParams(max_tokens=3), arrival_time_s, output))
    assert (answer.finish_reason, answer.error) == (FinishReason.ERROR, ErrorCode.INTERNAL_ERROR)
    assert field in answer.error_message
    scheduler.check_idle()


@pytest.mark.parametrize(
    ("output", "finish_reason", "stop_token_id"),
    [([9, 2], FinishReason.STOP, 2), ([9, 9, 9], FinishReason.LENGTH, None), ([9] * 9, FinishReason.LENGTH, None)],
)
def test_a_complete_request_that_is_sent_again_just_ends(output, finish_reason, stop_token_id):
    scheduler = make_scheduler(make_config())
    answer = scheduler.add(AddRequest("a", [5], SamplingParams(max_tokens=3), 0.0, output))
    assert (answer.first_index, answer.token_ids) == (len(output), [])
    assert (answer.finish_reason, answer.stop_token_id) == (finish_reason, stop_token_id)
    scheduler.check_idle()


def test_a_request_that_failed_alone_ends_with_its_error():
    scheduler = make_scheduler(make_config())
    add(scheduler, "bad")
    add(scheduler, "good")
    step = scheduler.schedule()
    scheduler.schedule()
    outputs = scheduler.update(
        ModelRunnerOutput(step.step_id, [NO_TOKEN, 9], {"bad": ErrorCode.NUMERICAL_ERROR, "else": ErrorCode.NEVER_FITS})
    )
    by_id = {output.request_id: output for output in outputs}
    assert len(outputs) == 2
    assert (by_id["bad"].finish_reason, by_id["bad"].error) == (FinishReason.ERROR, ErrorCode.NUMERICAL_ERROR)
    assert by_id["good"].token_ids == [9]
    assert list(scheduler.requests) == ["good"]
    scheduler.kv_cache_manager.check()


def test_an_error_of_a_request_that_has_ended_is_dropped():
    scheduler = make_scheduler(make_config())
    add(scheduler)
    steps = [scheduler.schedule(), scheduler.schedule()]
    errors = {"a": ErrorCode.NUMERICAL_ERROR}
    assert len(scheduler.update(ModelRunnerOutput(steps[0].step_id, [NO_TOKEN], errors))) == 1
    assert scheduler.update(ModelRunnerOutput(steps[1].step_id, [NO_TOKEN], errors)) == []


def test_an_error_in_the_middle_of_a_prompt_counts():
    scheduler = make_scheduler(make_config(max_num_batched_tokens=2))
    add(scheduler)
    step = scheduler.schedule()
    (output,) = scheduler.update(ModelRunnerOutput(step.step_id, [], {"a": ErrorCode.NUMERICAL_ERROR}))
    assert output.error is ErrorCode.NUMERICAL_ERROR
    scheduler.check_idle()


def test_a_worker_that_does_not_report_a_token_costs_that_request_only():
    scheduler = make_scheduler(make_config())
    add(scheduler, "a")
    add(scheduler, "b")
    step = scheduler.schedule()
    outputs = scheduler.update(ModelRunnerOutput(step.step_id, [NO_TOKEN, 9]))
    assert [output.error for output in outputs] == [ErrorCode.INTERNAL_ERROR, None]
    assert list(scheduler.requests) == ["b"]


@pytest.mark.parametrize("sampled", [[], [9], [9, 9, 9]])
def test_a_result_that_does_not_match_the_step_costs_all_that_it_should_have_had(sampled):
    scheduler = make_scheduler(make_config())
    add(scheduler, "a")
    add(scheduler, "b")
    step = scheduler.schedule()
    outputs = scheduler.update(ModelRunnerOutput(step.step_id, sampled))
    assert [output.error for output in outputs] == [ErrorCode.INTERNAL_ERROR] * 2
    scheduler.check_idle()


def test_a_result_out_of_order_changes_nothing():
    scheduler = make_scheduler(make_config())
    with pytest.raises(UnexpectedResultError):
        scheduler.update(ModelRunnerOutput(0, []))
    add(scheduler)
    scheduler.schedule()
    second = scheduler.schedule()
    with pytest.raises(UnexpectedResultError):
        scheduler.update(ModelRunnerOutput(second.step_id, [9]))
    assert len(scheduler.steps_in_flight) == 2
    assert scheduler.requests["a"].num_output_tokens == 0


def test_counters_and_gauges():
    harness = harness_with(block_size=4, num_device_blocks=16, max_num_seqs=1, max_steps_in_flight=1)
    harness.new("a", range(5), max_tokens=2)
    harness.new("b", range(5), max_tokens=2)
    harness.schedule()
    stats = harness.scheduler.stats()
    assert (stats.num_running_requests, stats.num_waiting_requests) == (1, 1)
    assert (stats.num_used_blocks, stats.num_total_blocks) == (2, 16)
    assert (stats.num_steps, stats.num_scheduled_tokens, stats.num_preemptions) == (1, 5, 0)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.num_running_requests, stats.num_waiting_requests, stats.num_used_blocks) == (0, 0, 0)
    assert (stats.num_steps, stats.num_scheduled_tokens) == (4, 12)


def test_idle_means_that_nothing_is_held():
    scheduler = make_scheduler(make_config())
    scheduler.check_idle()
    leaked = make_request(AddRequest("leaked", [1], SamplingParams(max_tokens=1), 0.0))
    scheduler.kv_cache_manager.add_table(leaked, NO_PREFIX, 1)
    with pytest.raises(InvariantError, match="blocks are held"):
        scheduler.check_idle()
    scheduler.kv_cache_manager.free("leaked")
    add(scheduler)
    with pytest.raises(InvariantError, match="1 requests, but no step in flight"):
        scheduler.check_idle()


def test_status_only_moves_along_the_table():
    request = make_request(AddRequest("a", [1], SamplingParams(max_tokens=1), 0.0))
    request.move_to(RequestStatus.RUNNING)
    request.move_to(RequestStatus.WAITING)
    request.move_to(RequestStatus.RUNNING)
    request.move_to(RequestStatus.SWAPPED)
    with pytest.raises(InvariantError):
        request.move_to(RequestStatus.WAITING)
    request.move_to(RequestStatus.FINISHED)
    for status in RequestStatus:
        with pytest.raises(InvariantError):
            request.move_to(status)
