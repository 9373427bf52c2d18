"""Whatever the block size, chunk, budget, memory and overlap: the same requests get the same tokens."""

import itertools
import random

import pytest
from scheduler_harness import SchedulerHarness, make_config

from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams


def workload(num_requests, seed=7, max_prompt_tokens=40, max_output_tokens=30):
    """Requests of many shapes; some share a prompt, some arrive at the same time."""
    numbers = random.Random(seed)
    prompts = [[numbers.randrange(10_007) for _ in range(numbers.randint(1, max_prompt_tokens))] for _ in range(12)]
    for index in range(num_requests):
        max_tokens = numbers.randint(1, max_output_tokens)
        yield AddRequest(
            f"r{index}",
            numbers.choice(prompts),
            SamplingParams(
                max_tokens=max_tokens,
                min_tokens=numbers.choice([0, 0, max_tokens // 2]),
                temperature=numbers.choice([0.0, 0.7]),
                seed=numbers.randrange(2**63),
                choice_index=numbers.randrange(2),
                ignore_eos=numbers.random() < 0.3,
            ),
            float(index // 3),
        )


def run(config, commands, num_added_per_turn=3):
    """Add a few requests, run a step or two, and so on, then run to the end; check every output."""
    harness = SchedulerHarness(config)
    commands = iter(commands)
    while batch := list(itertools.islice(commands, num_added_per_turn)):
        for command in batch:
            harness.add(command)
        while harness.can_schedule() and harness.schedule() is not None:
            pass
        harness.deliver()
    harness.run()
    harness.check_outputs()
    return harness


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("num_tokens_of_memory", [80, 800])
@pytest.mark.parametrize("max_num_batched_tokens", [5, 512])
@pytest.mark.parametrize("max_tokens_per_request", [None, 1, 7])
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_every_combination_gives_the_same_tokens(
    block_size, max_tokens_per_request, max_num_batched_tokens, num_tokens_of_memory, max_steps_in_flight
):
    config = make_config(
        block_size=block_size,
        num_device_blocks=num_tokens_of_memory // block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_tokens_per_request=max_tokens_per_request,
        max_steps_in_flight=max_steps_in_flight,
    )
    harness = run(config, workload(24))
    if num_tokens_of_memory == 80 and max_num_batched_tokens == 512 and block_size < 16:
        assert harness.scheduler.counters.num_preemptions > 0, "this memory was meant to be too small"


def test_the_same_commands_give_the_same_frames():
    config = make_config(block_size=2, num_device_blocks=40, max_num_batched_tokens=16)
    harness = run(config, workload(40))
    assert harness.scheduler.counters.num_preemptions > 0
    assert harness.replay() == harness.frames


@pytest.mark.parametrize("kill_after", range(1, 30, 4))
def test_requests_go_on_after_a_crash_where_they_were(kill_after):
    config = make_config(block_size=4, num_device_blocks=30, max_num_batched_tokens=24)
    harness = SchedulerHarness(config)
    for command in workload(12):
        harness.add(command)
    for turn in range(1, 200):
        while harness.can_schedule() and harness.schedule() is not None:
            pass
        if not harness.results:
            break
        harness.deliver()
        if turn % kill_after == 0 and turn < 4 * kill_after:
            harness.restart()
    harness.run()
    harness.check_outputs()
