"""Interleavings of searches, tenants, failures and spoilt blocks that need rules of their own."""

import gc
import random
import weakref

import pytest
from scheduler_harness import SchedulerHarness, expected, make_config, make_scheduler

from octavo.engine_core import kv_cache_manager
from octavo.engine_core.preemption import PreemptionLog
from octavo.engine_core.request import Request
from octavo.engine_core.request_queue import RequestQueue
from octavo.protocol.config import AdmissionPolicy, PreemptionMode, SchedulingPolicy
from octavo.protocol.engine_messages import AddRequest, BeamSearchParams, ErrorCode
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import NO_TOKEN, ModelRunnerOutput

MODEL = make_config().model


def command(request_id, prompt, arrival_time_s=0.0, *, max_tokens=5, **fields):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return AddRequest(request_id, list(prompt), params, arrival_time_s, **fields)


def make_request(number):
    return Request(command(f"r{number}", [1]), (0, float(number), number, 0), MODEL, b"root")


def test_a_request_that_starts_over_may_meet_its_old_entry_in_the_queue():
    queue = RequestQueue()
    requests = [make_request(number) for number in range(3)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[1], is_admitted=True)
    queue.push(requests[1].start_over())
    assert len(queue) == 3


# Searches that wait for each other for ever


@pytest.mark.parametrize("tenants", ["aa", "ab", "ba"])
@pytest.mark.parametrize("policy", SchedulingPolicy)
@pytest.mark.parametrize("scarce", ["rows", "blocks"])
def test_two_searches_of_which_only_one_fits_run_one_after_the_other(tenants, policy, scarce):
    memory = {"max_num_seqs": 4} if scarce == "rows" else {"num_device_blocks": 15, "max_num_seqs": 8}
    harness = SchedulerHarness(make_config(block_size=4, eos_token_ids=(), scheduling_policy=policy, **memory))
    for index, tenant in enumerate(tenants):
        search = BeamSearchParams(4, 4)
        harness.add(command(f"s{index}", [5 + index] * 6, index, max_tokens=10, tenant=tenant, beam_search=search))
    for _ in range(500):
        while harness.can_schedule() and harness.schedule() is not None:
            pass
        if harness.results:
            harness.deliver()
    assert not harness.scheduler.requests
    harness.check_outputs()


@pytest.mark.parametrize("seed", range(30))
def test_beams_that_lost_their_common_beginning_find_together_again(seed):
    """The prompt's blocks are forgotten (as after a bit flip) and one beam recomputes them: the pool fits one copy."""
    numbers = random.Random(seed)
    harness = SchedulerHarness(make_config(block_size=4, num_device_blocks=8, eos_token_ids=(), max_steps_in_flight=1))
    prompt = [numbers.randrange(99) for _ in range(9)]
    harness.add(command("s", prompt, max_tokens=8, beam_search=BeamSearchParams(3, 3)))
    for _ in range(numbers.randint(2, 6)):
        harness.schedule()
        harness.deliver()
    scheduler = harness.scheduler
    scheduler.kv_cache_manager.forget(list(scheduler.kv_cache_manager.device_pool.hash_to_block_id))
    scheduler.preemption.preempt(scheduler.running[-1])
    for _ in range(300):
        while harness.can_schedule() and harness.schedule() is not None:
            pass
        if harness.results:
            harness.deliver()
    assert not scheduler.requests
    harness.check_outputs()


# KV that may be wrong


def found(scheduler, prompt):
    scheduler.add(command("finder", prompt, 99.0))
    return scheduler.kv_cache_manager.find_prefix(scheduler.requests["finder"]).num_tokens


def test_a_request_that_fails_after_its_abort_leaves_nothing_to_be_found():
    scheduler = make_scheduler(make_config(block_size=2))
    scheduler.add(command("a", range(6)))
    step = scheduler.schedule()
    scheduler.abort(["a"])
    scheduler.update(ModelRunnerOutput(step.step_id, [NO_TOKEN], {"a": ErrorCode.NUMERICAL_ERROR}))
    assert found(scheduler, range(9)) == 0


def test_a_request_that_fails_after_its_end_leaves_nothing_to_be_found():
    """It ends with the result of one step, and the next one, which was sent ahead, fails."""
    scheduler = make_scheduler(make_config(block_size=4))
    scheduler.add(command("a", [10, 11], max_tokens=9))
    steps = [scheduler.schedule(), scheduler.schedule()]
    scheduler.update(ModelRunnerOutput(steps[0].step_id, [9]))
    steps.append(scheduler.schedule())
    scheduler.update(ModelRunnerOutput(steps[1].step_id, [2]))
    scheduler.update(ModelRunnerOutput(steps[2].step_id, [NO_TOKEN], {"a": ErrorCode.NUMERICAL_ERROR}))
    assert found(scheduler, [10, 11, 9, 2, 5]) == 0


@pytest.mark.parametrize(("mode", "num_host_blocks"), [(PreemptionMode.RECOMPUTE, 0), (PreemptionMode.SWAP, 20)])
def test_a_request_that_fails_while_preempted_leaves_nothing_to_be_found(mode, num_host_blocks):
    scheduler = make_scheduler(
        make_config(
            block_size=2, num_device_blocks=14, num_host_blocks=num_host_blocks, preemption_mode=mode, eos_token_ids=()
        )
    )
    scheduler.add(command("old", [1], 0.0, max_tokens=24))
    scheduler.add(command("a", range(10, 16), 1.0, max_tokens=20))
    while not scheduler.counters.num_preemptions:
        if len(scheduler.steps_in_flight) == 2:
            plan = scheduler.steps_in_flight[0]
            scheduler.update(ModelRunnerOutput(plan.step_id, [7] * len(plan.sampling)))
        scheduler.schedule()
    plan = scheduler.steps_in_flight[0]
    tokens = [NO_TOKEN if request.request_id == "a" else 7 for request in plan.sampling]
    assert NO_TOKEN in tokens
    scheduler.update(ModelRunnerOutput(plan.step_id, tokens, {"a": ErrorCode.NUMERICAL_ERROR}))
    assert found(scheduler, [*range(10, 16), 7, 7]) == 0
    names = scheduler.requests["finder"].block_hashes
    assert all(scheduler.kv_cache_manager.host_pool.find(name) is None for name in names)


def test_a_corrupt_block_is_not_found_after_its_request_was_aborted():
    config = make_config(block_size=2, num_device_blocks=8, num_host_blocks=8, kv_offload_bytes=1, eos_token_ids=())
    harness = SchedulerHarness(config)
    harness.new("first", range(10, 19), 0.0, max_tokens=1)
    harness.run()
    harness.new("evicts it", range(50, 66), 1.0, max_tokens=1)
    harness.run()
    for block_id in list(harness.scheduler.kv_cache_manager.host_pool.cached):
        harness.spoil_host_block(block_id)
    harness.new("gets it back", range(10, 19), 2.0, max_tokens=5)
    harness.schedule()
    harness.abort(["gets it back"])
    harness.deliver()
    last = harness.new("last", range(10, 19), 3.0, max_tokens=5)
    harness.run()
    assert last.output_token_ids == expected(config, last.command)[0]


# Shared blocks that are written


def test_a_swapped_request_never_writes_into_a_shared_block(monkeypatch):
    """Searches of one prompt: a beam takes its report back, and its last block, full, belongs to others as well."""
    add_table = kv_cache_manager.KVCacheManager.add_table

    def checked(self, request, prefix, num_tokens):
        table = add_table(self, request, prefix, num_tokens)
        written = (table or [])[prefix.num_tokens // self.block_size :]
        assert all(self.device_pool.num_references[block_id] == 1 for block_id in written)
        return table

    monkeypatch.setattr(kv_cache_manager.KVCacheManager, "add_table", checked)
    for seed in range(150):
        numbers = random.Random(seed)
        config = make_config(
            block_size=2,
            num_device_blocks=numbers.randint(15, 25),
            num_host_blocks=100,
            max_num_seqs=12,
            preemption_mode=PreemptionMode.SWAP,
            eos_token_ids=(),
        )
        harness = SchedulerHarness(config)
        prompt = [numbers.randrange(99) for _ in range(numbers.randint(2, 5))]
        harness.new("old", [1, 2, 3], -1.0, max_tokens=numbers.randint(14, 25))
        for index in range(3):
            harness.add(command(f"s{index}", prompt, index, max_tokens=10, beam_search=BeamSearchParams(2, 2)))
        harness.run()


# How often a request is preempted


@pytest.mark.parametrize("kind", ["two tenants", "longest prefix", "older ones come later"])
def test_nobody_is_preempted_more_often_than_allowed(kind):
    for seed in range(20):
        numbers = random.Random(seed)
        config = make_config(
            block_size=1,
            num_device_blocks=numbers.randint(30, 60),
            max_preemptions_per_request=2,
            eos_token_ids=(),
            scheduling_policy=SchedulingPolicy.LONGEST_PREFIX if kind == "longest prefix" else SchedulingPolicy.FCFS,
        )
        harness, requests = SchedulerHarness(config), {}
        for index in range(60):
            prompt = [numbers.randrange(9999) for _ in range(numbers.randint(1, 6))]
            arrival = float(numbers.randrange(60)) if kind == "older ones come later" else float(index)
            tenant = "b" if kind == "two tenants" and index % 6 == 5 else "a"
            harness.add(command(f"r{index}", prompt, arrival, max_tokens=numbers.randint(5, 28), tenant=tenant))
            requests.update(harness.scheduler.requests)
            if kind != "two tenants":
                while harness.can_schedule() and harness.schedule() is not None:
                    pass
                if harness.results:
                    harness.deliver()
        harness.run()
        assert max(request.num_preemptions for request in requests.values()) <= 2


# Others


def test_a_fork_whose_origins_id_is_taken_by_another_prompt_shares_nothing_with_it():
    config = make_config(block_size=2, eos_token_ids=())
    harness = SchedulerHarness(config)
    harness.add(command("a", range(5)))
    fork = harness.add(command("b", range(5), 1.0, fork_of="a"))
    harness.abort(["a"])
    harness.add(command("a", range(20, 25), 0.5))
    harness.schedule()
    harness.run()
    assert fork.output_token_ids == expected(config, fork.command)[0]


def test_pressure_without_a_pause_is_logged_too_and_does_not_pile_up(caplog):
    """One preemption in 100 steps, for a million steps: today not a line, and an entry for every victim."""
    log = PreemptionLog()
    for number in range(10_000):
        log.add(make_request(number), number * 100, is_swapped=False)
        log.end_burst(number * 100 + 99)
    assert caplog.records
    assert len(log._victims) < 5000


def test_a_request_that_asks_for_candidates_itself_is_refused():
    """Nobody would choose its next token: the worker would be told to compute a token that does not exist."""
    answer = make_scheduler(make_config()).add(
        AddRequest("a", [1, 2, 3], SamplingParams(max_tokens=5, num_candidates=4), 0.0)
    )
    assert answer is not None
    assert answer.error is ErrorCode.INTERNAL_ERROR


@pytest.mark.parametrize("seed", range(30))
def test_reserve_all_never_preempts(seed):
    """Whatever comes together: searches take blocks for the beams that they are not yet forked into, choices share."""
    numbers = random.Random(seed)
    config = make_config(
        block_size=2,
        num_device_blocks=numbers.choice([24, 30, 36]),
        max_num_seqs=16,
        eos_token_ids=(),
        admission_policy=AdmissionPolicy.RESERVE_ALL,
        scheduling_policy=numbers.choice([SchedulingPolicy.FCFS, SchedulingPolicy.LONGEST_PREFIX]),
    )
    harness = SchedulerHarness(config)
    begin = [numbers.randrange(100) for _ in range(6)]
    for index in range(12):
        prompt = begin[: numbers.choice([0, 4, 6])] + [numbers.randrange(100) for _ in range(numbers.randint(1, 6))]
        max_tokens = numbers.randint(1, 10)
        if numbers.random() < 0.4:
            search = BeamSearchParams(numbers.randint(2, 4), 1)
            harness.add(command(f"r{index}", prompt, index, max_tokens=max_tokens, beam_search=search))
        else:
            fork_of = f"r{index - 1}" if numbers.random() < 0.5 else ""
            harness.add(command(f"r{index}", prompt, index, max_tokens=max_tokens, fork_of=fork_of))
        for _ in range(numbers.choice([0, 0, 1, 3])):
            if harness.can_schedule():
                harness.schedule()
            elif harness.results:
                harness.deliver()
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.counters.num_preemptions == 0


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_search_that_ended_leaves_no_reference_cycle(is_aborted):
    harness = SchedulerHarness(make_config(eos_token_ids=()))
    harness.add(command("s", [1, 2, 3], beam_search=BeamSearchParams(3, 2)))
    harness.schedule()
    group = weakref.ref(harness.scheduler.beam_groups["s"])
    gc.collect()
    gc.disable()
    try:
        if is_aborted:
            harness.abort(["s"])
        harness.run()
        harness.new("next", [9, 9], max_tokens=3)  # steps in flight and plans forget who was in them
        harness.run()
        assert group() is None
    finally:
        gc.enable()
