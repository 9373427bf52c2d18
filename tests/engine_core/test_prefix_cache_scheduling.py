"""Sharing as the scheduler does it: who computes a beginning, who waits for it, who finds it, who must not."""

import msgspec
import pytest
from scheduler_harness import SchedulerHarness, make_config

from octavo.engine_core.request import RequestStatus
from octavo.protocol.engine_messages import AddRequest, BeamSearchParams, ErrorCode, FinishReason
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import NO_TOKEN, CopyKind, ModelRunnerOutput

BLOCK = 4


def harness_with(**config):
    return SchedulerHarness(make_config(**{"eos_token_ids": (), "block_size": BLOCK, **config}))


def command(request_id, prompt, arrival_time_s=0.0, *, max_tokens=3, temperature=0.0, choice_index=0, **fields):
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, choice_index=choice_index)
    return AddRequest(request_id, list(prompt), params, arrival_time_s, **fields)


def computed(harness, log):
    """Tokens that steps compute until the request has ended, over all requests."""
    before = harness.scheduler.counters.num_scheduled_tokens
    harness.run()
    assert log.finish_reason is FinishReason.LENGTH
    return harness.scheduler.counters.num_scheduled_tokens - before


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("num_prompt_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, 3 * BLOCK + 2])
def test_an_equal_prompt_computes_only_what_is_not_in_full_blocks(num_prompt_tokens, max_steps_in_flight):
    harness = harness_with(max_steps_in_flight=max_steps_in_flight)
    first = harness.add(command("a", range(num_prompt_tokens)))
    assert computed(harness, first) == num_prompt_tokens + 2
    second = harness.add(command("b", range(num_prompt_tokens)))
    num_cached_tokens = (num_prompt_tokens - 1) // BLOCK * BLOCK
    assert computed(harness, second) == num_prompt_tokens + 2 - num_cached_tokens
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_cached_tokens)
    assert second.num_cached_tokens < num_prompt_tokens
    stats = harness.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (2 * num_prompt_tokens, num_cached_tokens)
    harness.check_outputs()


def test_without_the_cache_everything_is_computed():
    harness = harness_with(enable_prefix_caching=False)
    for name in "ab":
        log = harness.add(command(name, range(9)))
        assert computed(harness, log) == 11
        assert log.num_cached_tokens == 0


def test_requests_of_one_step_share_what_it_computes():
    """The second takes the blocks whose computation was scheduled a moment ago; so does the third."""
    harness = harness_with()
    logs = [harness.add(command(name, [*range(8), index], index)) for index, name in enumerate("abc")]
    step = harness.schedule()
    assert step.num_scheduled_tokens == {"a": 9, "b": 1, "c": 1}
    tables = [new.block_ids for new in step.new_requests]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    harness.run()
    assert [log.num_cached_tokens for log in logs] == [0, 8, 8]
    harness.check_outputs()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_who_needs_what_another_one_is_computing_waits_for_it(max_steps_in_flight):
    """`b` and `d` begin like `a`, whose prompt takes three steps; `c` does not, and is not held up."""
    harness = harness_with(max_tokens_per_request=4, max_steps_in_flight=max_steps_in_flight)
    harness.add(command("a", range(12), 0))
    b = harness.add(command("b", [*range(8), 50, 51], 1))
    c = harness.add(command("c", [60, 61], 2))
    d = harness.add(command("d", [*range(12), 70], 3))
    first_steps = {}
    for number in range(6):
        while not harness.can_schedule():
            harness.deliver()
        step = harness.schedule()
        for new in step.new_requests if step is not None else ():
            first_steps[new.request_id] = number
    assert first_steps == {"a": 0, "c": 0, "b": 1, "d": 2}, "as soon as the blocks are scheduled"
    harness.run()
    assert (b.num_cached_tokens, c.num_cached_tokens, d.num_cached_tokens) == (8, 0, 12)
    assert not harness.scheduler.admission.promises.makers
    assert not harness.scheduler.admission.promises._hashes
    harness.check_outputs()


def test_who_waits_goes_on_by_itself_when_the_other_one_is_aborted():
    harness = harness_with(max_tokens_per_request=4)
    harness.add(command("a", range(12), 0))
    b = harness.add(command("b", [*range(12), 50], 1))
    harness.schedule()
    assert list(harness.scheduler.waiting.deferred) == ["b"]
    harness.abort(["a"])
    step = harness.schedule()
    assert [new.request_id for new in step.new_requests] == ["b"]
    harness.run()
    assert b.num_cached_tokens == 4, "what was computed by then is there"
    harness.check_outputs()


def test_who_waits_goes_on_by_itself_when_the_other_one_fails():
    harness = harness_with(max_tokens_per_request=4, max_steps_in_flight=1)
    harness.add(command("a", range(12), 0))
    harness.add(command("b", [*range(12), 50], 1))
    step = harness.schedule()
    harness.results.clear()
    (output,) = harness.scheduler.update(ModelRunnerOutput(step.step_id, [], {"a": ErrorCode.NUMERICAL_ERROR}))
    harness.logs["a"].apply(output)
    (new,) = harness.schedule().new_requests
    assert (new.request_id, new.num_computed_tokens) == ("b", 0)
    harness.run()


def test_who_waits_goes_on_by_itself_when_the_other_one_is_preempted():
    """`old` takes the last block while `a` is in the middle of its prompt."""
    harness = harness_with(
        block_size=1, num_device_blocks=17, max_tokens_per_request=2, max_steps_in_flight=1, max_num_seqs=3
    )
    harness.add(command("old", [99], 0, max_tokens=12))
    harness.schedule()
    harness.deliver()
    harness.add(command("a", range(12), 1, max_tokens=1))
    harness.add(command("b", [*range(12), 50], 2, max_tokens=1))
    waits = []
    while harness.has_work():
        harness.schedule()
        harness.deliver()
        waits.append("b" in harness.scheduler.waiting.deferred)
    assert harness.scheduler.counters.num_preemptions > 0
    assert True in waits
    harness.check_outputs()


def test_the_next_turn_of_a_chat_finds_the_answer_before_it():
    harness = harness_with()
    first = harness.add(command("a", range(6), max_tokens=9))
    harness.run()
    turn = [*range(6), *first.output_token_ids, 80, 81]
    second = harness.add(command("b", turn))
    assert computed(harness, second) == len(turn) + 2 - 12
    assert second.num_cached_tokens == 12, "14 of its tokens were computed: three full blocks"
    harness.check_outputs()


def test_nothing_is_shared_across_salts():
    harness = harness_with()
    logs = [
        harness.add(command(f"r{index}", range(9), index, cache_salt=salt))
        for index, salt in enumerate(["", "one", "two", "one"])
    ]
    harness.run()
    assert [log.num_cached_tokens for log in logs] == [0, 0, 0, 8]
    again = harness.add(command("again", range(9), 9, cache_salt="three"))
    harness.run()
    assert again.num_cached_tokens == 0
    harness.check_outputs()


def test_a_fork_does_not_share_across_salts():
    harness = harness_with(enable_prefix_caching=False)
    harness.add(command("a", range(9), 0))
    harness.schedule()
    fork = harness.add(command("b", range(9), 1, fork_of="a", cache_salt="other"))
    harness.run()
    assert fork.num_cached_tokens == 0


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_prompt_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 3 * BLOCK, 3 * BLOCK + 2])
def test_choices_share_the_prompt_and_copy_its_partial_block(num_prompt_tokens, enable_prefix_caching):
    num_choices = 4
    harness = harness_with(enable_prefix_caching=enable_prefix_caching)
    logs = [
        harness.add(
            command(
                f"c{index}",
                range(num_prompt_tokens),
                max_tokens=9,
                temperature=1.0,
                choice_index=index,
                fork_of="c0" if index else "",
            )
        )
        for index in range(num_choices)
    ]
    copies, num_logical_blocks, num_distinct_blocks = [], 0, 0
    while len(harness.scheduler.running) < num_choices:
        step = harness.schedule()
        copies += step.copies
        tables = harness.scheduler.kv_cache_manager.block_tables
        num_logical_blocks = sum(len(table) for table in tables.values())
        num_distinct_blocks = len({block_id for table in tables.values() for block_id in table})
        if len(harness.scheduler.running) < num_choices:
            harness.deliver()
    num_shared_blocks, num_rest_tokens = divmod(num_prompt_tokens - 1, BLOCK)
    assert num_logical_blocks - num_distinct_blocks == (num_choices - 1) * num_shared_blocks
    assert [kind for kind, _, _ in copies] == [CopyKind.DEVICE] * (num_choices - 1) * (num_rest_tokens > 0)
    harness.run()
    assert [log.num_cached_tokens for log in logs] == [0] + [num_prompt_tokens - 1] * (num_choices - 1)
    assert len({tuple(log.output_token_ids) for log in logs}) == num_choices
    harness.check_outputs()


def test_beams_share_all_that_they_have_in_common():
    """At any step, blocks are held twice only where beams differ; after the prompt at most one per beam and length."""
    harness = harness_with(num_device_blocks=64, eos_token_ids=(2,))
    harness.add(command("s", range(10), max_tokens=20, beam_search=BeamSearchParams(4, 4)))
    num_logical_blocks = num_distinct_blocks = 0
    while harness.has_work():
        while harness.can_schedule() and harness.schedule() is not None:
            pass
        tables = list(harness.scheduler.kv_cache_manager.block_tables.values())
        num_logical_blocks += sum(len(table) for table in tables)
        num_distinct_blocks += len({block_id for table in tables for block_id in table})
        if len(tables) == 4:
            assert len({tuple(table[:2]) for table in tables}) == 1
        harness.deliver()
    assert num_distinct_blocks < 0.7 * num_logical_blocks
    harness.check_outputs()


def fail(scheduler, step, request_id, others):
    """The result of a step in which the request's row had no finite logits."""
    sampling = [request.request_id for request in scheduler.steps_in_flight[0].sampling]
    tokens = [NO_TOKEN if name == request_id else others for name in sampling]
    return scheduler.update(ModelRunnerOutput(step.step_id, tokens, {request_id: ErrorCode.NUMERICAL_ERROR}))


@pytest.mark.parametrize("num_prompt_tokens", [3, 4, 9, 16])
def test_a_request_that_failed_leaves_nothing_to_be_found(num_prompt_tokens):
    harness = harness_with()
    scheduler = harness.scheduler
    scheduler.add(command("a", range(num_prompt_tokens), max_tokens=30))
    step = scheduler.schedule()
    for _ in range(8):
        later = scheduler.schedule()
        scheduler.update(ModelRunnerOutput(step.step_id, [7]))
        step = later
    scheduler.schedule()
    (output,) = fail(scheduler, step, "a", 7)
    assert output.error is ErrorCode.NUMERICAL_ERROR
    manager = scheduler.kv_cache_manager
    assert not manager.device_pool.hash_to_block_id
    assert manager.num_used_blocks == len(manager.device_pool.cached) == 0
    manager.check()


@pytest.mark.parametrize("num_steps", range(1, 2 * BLOCK + 1))
def test_a_block_that_the_failing_step_filled_is_not_found_either(num_steps):
    scheduler = harness_with(max_steps_in_flight=1).scheduler
    scheduler.add(command("a", range(BLOCK - 1), max_tokens=30))
    for _ in range(num_steps - 1):
        scheduler.update(ModelRunnerOutput(scheduler.schedule().step_id, [7]))
    fail(scheduler, scheduler.schedule(), "a", 7)
    assert not scheduler.kv_cache_manager.device_pool.hash_to_block_id


def test_a_search_that_failed_leaves_nothing_to_be_found():
    harness = harness_with(max_steps_in_flight=1)
    harness.add(command("s", range(9), max_tokens=12, beam_search=BeamSearchParams(3, 3)))
    for _ in range(6):
        harness.schedule()
        harness.deliver()
    step = harness.schedule()
    harness.results.clear()
    beams = harness.scheduler.beam_groups["s"].running
    named = {block_hash for beam in beams for block_hash in beam.block_hashes}
    assert len(named) > 2
    (output,) = fail(harness.scheduler, step, beams[1].request_id, NO_TOKEN)
    assert (output.request_id, output.error) == ("s", ErrorCode.NUMERICAL_ERROR)
    assert not named & harness.scheduler.kv_cache_manager.device_pool.hash_to_block_id.keys()
    assert (harness.scheduler.requests, harness.scheduler.beam_groups) == ({}, {})


def test_neighbours_of_a_request_that_failed_keep_their_blocks():
    harness = harness_with()
    scheduler = harness.scheduler
    scheduler.add(command("good", range(20, 29), max_tokens=5))
    scheduler.add(command("bad", range(9), max_tokens=5))
    fail(scheduler, scheduler.schedule(), "bad", 7)
    assert list(scheduler.requests) == ["good"]
    assert len(scheduler.kv_cache_manager.device_pool.hash_to_block_id) == 2


def test_a_long_prompt_does_not_keep_others_from_their_tokens():
    """100,000 tokens in chunks: each step gives every decoding request its token, and no more than the share to it."""
    harness = harness_with(
        block_size=16,
        num_device_blocks=7000,
        max_model_len=110_000,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        max_prefill_share=0.5,
    )
    scheduler = harness.scheduler
    for index in range(8):
        scheduler.add(command(f"short {index}", [index, 1, 2], index, max_tokens=1000))
    scheduler.update(ModelRunnerOutput(scheduler.schedule().step_id, [7] * 8))
    scheduler.add(command("long", [n % 9973 for n in range(100_000)], 100.0, max_tokens=2))
    num_steps = 0
    while "long" not in scheduler.requests or not scheduler.requests["long"].num_output_tokens:
        step = scheduler.schedule()
        num_steps += 1
        assert len(scheduler.steady) == 8
        assert step.num_scheduled_tokens.get("long", 0) <= 1024
        sampling = scheduler.steps_in_flight[0].sampling
        outputs = scheduler.update(ModelRunnerOutput(step.step_id, [7] * len(sampling)))
        assert {f"short {index}" for index in range(8)} <= {output.request_id for output in outputs}
    assert num_steps == -(-100_000 // 1024)


def test_the_prefill_share_is_one_for_all_long_prompts_together():
    harness = harness_with(max_num_batched_tokens=16, max_num_seqs=8, max_prefill_share=0.5, num_device_blocks=100)
    harness.add(command("decodes", [1], 0, max_tokens=100))
    harness.schedule()
    harness.deliver()
    for index in range(3):
        harness.add(command(f"long {index}", range(100 * index, 100 * index + 24), 1 + index, max_tokens=1))
    num_prefill_tokens = []
    while len(harness.scheduler.requests) > 1:
        step = harness.schedule()
        num_prefill_tokens.append(sum(step.num_scheduled_tokens.values()))
        harness.deliver()
    assert max(num_prefill_tokens) == 8
    assert sum(num_prefill_tokens) == 72


def test_without_anybody_decoding_a_long_prompt_takes_the_whole_budget():
    harness = harness_with(max_num_batched_tokens=16, max_prefill_share=0.25, num_device_blocks=100)
    harness.add(command("long", range(60), max_tokens=1))
    chunks = []
    while (step := harness.schedule()) is not None:
        chunks.append(step.num_scheduled_tokens["long"])
        harness.deliver()
    assert chunks == [16, 16, 16, 12]


def test_cached_tokens_are_those_of_the_first_admission():
    """A preemption and a resume, by swap or recompute, do not change what the client is told."""
    for num_host_blocks in (0, 40):
        harness = harness_with(block_size=1, num_device_blocks=24, num_host_blocks=num_host_blocks)
        seen = harness.add(command("a", range(4), 0, max_tokens=1))
        harness.run()
        logs = [harness.add(command(f"r{index}", [*range(4), index], index, max_tokens=15)) for index in range(3)]
        harness.run()
        assert harness.scheduler.counters.num_preemptions > 0
        assert seen.num_cached_tokens == 0
        assert [log.num_cached_tokens for log in logs] == [4, 4, 4]
        stats = harness.scheduler.stats()
        assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (4 + 3 * 5, 3 * 4)
        harness.check_outputs()


def test_a_swapped_request_shares_again_what_is_still_on_the_device():
    harness = harness_with(block_size=1, num_device_blocks=20, num_host_blocks=40, max_steps_in_flight=1)
    harness.add(command("old", range(8), 0, max_tokens=12))
    harness.add(command("young", [*range(8), 50], 1, max_tokens=9))
    while harness.scheduler.counters.num_preemptions == 0:
        harness.schedule()
        harness.deliver()
    assert harness.scheduler.requests["young"].status is RequestStatus.SWAPPED
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.num_swapped_out_blocks > stats.num_swapped_in_blocks > 0
    harness.check_outputs()


def test_an_output_does_not_depend_on_a_hit():
    """The same requests, cold, warm, and with the cache off."""
    outputs = []
    for enable_prefix_caching in (True, False):
        harness = harness_with(enable_prefix_caching=enable_prefix_caching, eos_token_ids=(2,))
        for round_number in range(2):
            for index in range(6):
                prompt = [n % 3 for n in range(3 * index + 1)]
                harness.add(command(f"{round_number}.{index}", prompt, index, max_tokens=12, temperature=1.0))
            harness.run()
        harness.check_outputs()
        outputs.append({name[2:]: log.output_token_ids for name, log in harness.logs.items()})
        outputs.append({name[2:]: log.output_token_ids for name, log in harness.logs.items() if name[0] == "0"})
    assert all(msgspec.json.encode(output) == msgspec.json.encode(outputs[0]) for output in outputs)
