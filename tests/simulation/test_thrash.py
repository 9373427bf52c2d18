"""Far more requests than memory: everybody finishes, with the right output, and memory is conserved."""

import random

import pytest
from scheduler_harness import SchedulerHarness, make_config

from octavo.protocol.engine_messages import FinishReason


def test_growing_outputs_preempt_the_youngest():
    """Two requests are admitted into memory that only one of them can fill up."""
    config = make_config(block_size=2, num_device_blocks=10, max_steps_in_flight=1, eos_token_ids=())
    harness = SchedulerHarness(config)
    old = harness.new("old", [1, 2], arrival_time_s=0, max_tokens=16)
    young = harness.new("young", [3, 4], arrival_time_s=1, max_tokens=16)
    while harness.scheduler.counters.num_preemptions == 0:
        assert harness.schedule() is not None
        harness.deliver()
    assert [request.request_id for request in harness.scheduler.running] == ["old"]
    assert list(harness.scheduler.waiting.members) == ["young"]
    num_tokens_before = len(young.output_token_ids)
    assert num_tokens_before > 0
    while old.finish_reason is None:
        assert len(young.output_token_ids) == num_tokens_before
        harness.schedule()
        harness.deliver()
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_a_thousand_requests_in_memory_for_four(max_steps_in_flight):
    num_tokens_each = 16
    config = make_config(
        block_size=4,
        num_device_blocks=4 * num_tokens_each // 4,
        max_num_seqs=256,
        max_num_batched_tokens=64,
        max_steps_in_flight=max_steps_in_flight,
    )
    harness = SchedulerHarness(config)
    numbers = random.Random(3)
    for index in range(1000):
        num_prompt_tokens = numbers.randint(1, 6)
        prompt = [numbers.randrange(10_007) for _ in range(num_prompt_tokens)]
        harness.new(
            f"r{index}",
            prompt,
            arrival_time_s=numbers.random(),
            max_tokens=num_tokens_each - num_prompt_tokens,
            ignore_eos=True,
        )
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.counters.num_preemptions > 100


def test_an_abort_storm_leaves_nothing_behind():
    config = make_config(block_size=4, num_device_blocks=40)
    harness = SchedulerHarness(config)
    numbers = random.Random(5)
    survivors = []
    for index in range(600):
        log = harness.new(f"r{index}", [index, 1, 2], arrival_time_s=float(index), max_tokens=20)
        if index % 40 == 0:
            survivors.append(log)
        else:
            harness.abort([f"r{index}"] if numbers.random() < 0.5 else [f"r{index}", "unknown"])
        if index % 7 == 0:
            while harness.can_schedule() and harness.schedule() is not None:
                pass
            if harness.results:
                harness.deliver()
    harness.run()
    harness.check_outputs()
    assert all(log.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for log in survivors)
    assert harness.scheduler.waiting._levels == {}
