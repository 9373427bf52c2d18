"""Whatever the block size, chunk, budget, memory and overlap: the same requests get the same tokens and logprobs."""

import itertools
import random

import pytest
from scheduler_harness import SchedulerHarness, make_config

from octavo.protocol.config import PreemptionMode
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import NO_LOGPROBS, SamplingParams


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
                num_logprobs=numbers.choice([NO_LOGPROBS, 0, 2]),
                num_prompt_logprobs=numbers.choice([NO_LOGPROBS, NO_LOGPROBS, 0, 1]),
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


MEMORY = {  # name -> tokens of device memory, of host memory, what a preemption does
    "swap": (80, 400, PreemptionMode.SWAP),
    "recompute": (80, 0, PreemptionMode.RECOMPUTE),
    "roomy": (1600, 0, PreemptionMode.AUTO),
}


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("max_tokens_per_request", [None, 1, 7, 64])
def test_every_combination_gives_the_same_tokens(
    max_tokens_per_request, enable_prefix_caching, block_size, memory, max_steps_in_flight
):
    num_tokens, num_host_tokens, preemption_mode = MEMORY[memory]
    config = make_config(
        block_size=block_size,
        num_device_blocks=num_tokens // block_size,
        num_host_blocks=num_host_tokens // block_size,
        enable_prefix_caching=enable_prefix_caching,
        max_num_batched_tokens=512,
        max_tokens_per_request=max_tokens_per_request,
        max_steps_in_flight=max_steps_in_flight,
        preemption_mode=preemption_mode,
    )
    harness = run(config, workload(24))
    stats = harness.scheduler.stats()
    assert (stats.num_cached_tokens > 0) >= enable_prefix_caching
    if memory != "roomy" and block_size < 16:
        assert stats.num_preemptions > 0, "this memory was meant to be too small"
        assert (stats.num_swapped_in_blocks > 0) == (memory == "swap")


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
