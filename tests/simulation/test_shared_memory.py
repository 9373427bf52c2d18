"""Searches, choices of one prompt and ordinary requests together in memory for a few: swapped, forked, spoilt."""

import random

import msgspec
import pytest
from scheduler_harness import SchedulerHarness, make_config

from octavo.protocol.config import AdmissionPolicy, PreemptionMode
from octavo.protocol.engine_messages import AddRequest, BeamSearchParams, EarlyStopping
from octavo.protocol.sampling_params import SamplingParams

PREEMPTION_MODES = {0: PreemptionMode.RECOMPUTE, 20: PreemptionMode.SWAP, 200: PreemptionMode.SWAP}


def commands(seed, num_prompts=14):
    """Some prompts begin alike; each is asked for once, for several choices, or for beams."""
    numbers = random.Random(seed)
    begin = [numbers.randrange(10_007) for _ in range(9)]
    index = 0
    for number in range(num_prompts):
        prompt = begin[: numbers.choice([0, 4, 9])] + [numbers.randrange(10_007) for _ in range(numbers.randint(1, 9))]
        params = SamplingParams(
            max_tokens=numbers.randint(1, 14), temperature=numbers.choice([0.0, 1.0]), seed=numbers.randrange(99)
        )
        kind = numbers.choice(["request", "choices", "search"])
        for choice in range({"request": 1, "choices": numbers.randint(2, 4), "search": 1}[kind]):
            beam_search = None
            if kind == "search":
                num_beams = numbers.randint(1, 4)
                early_stopping = numbers.choice(list(EarlyStopping))
                beam_search = BeamSearchParams(num_beams, num_beams, numbers.choice([0.5, 1.0]), early_stopping)
            yield AddRequest(
                f"r{index}",
                prompt,
                msgspec.structs.replace(params, choice_index=choice),
                float(number),
                fork_of=f"r{index - choice}" if choice else "",
                beam_search=beam_search,
            )
            index += 1


def run(harness, requests, numbers, *, spoils=False):
    for command in requests:
        harness.add(command)
    while harness.has_work():
        while harness.can_schedule() and harness.schedule() is not None:
            pass
        if harness.results:
            harness.deliver()
        held = [i for i, n in enumerate(harness.scheduler.kv_cache_manager.host_pool.num_references) if n]
        if spoils and held and numbers.random() < 0.3:
            harness.spoil_host_block(numbers.choice(held))
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("num_host_blocks", PREEMPTION_MODES)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_everything_at_once_in_memory_for_a_few(enable_prefix_caching, num_host_blocks, seed):
    numbers = random.Random(seed)
    block_size = numbers.choice([1, 2, 4])
    config = make_config(
        block_size=block_size,
        num_device_blocks=112 // block_size,
        num_host_blocks=num_host_blocks // block_size,
        kv_offload_bytes=numbers.randrange(2),
        enable_prefix_caching=enable_prefix_caching,
        max_tokens_per_request=numbers.choice([None, 3]),
        max_steps_in_flight=numbers.choice([1, 2]),
        max_num_seqs=numbers.choice([4, 8, 16]),
        preemption_mode=PREEMPTION_MODES[num_host_blocks],
        admission_policy=numbers.choice(list(AdmissionPolicy)),
        max_preemptions_per_request=numbers.choice([1, 100]),
    )
    harness = SchedulerHarness(config)
    run(harness, commands(seed), numbers, spoils=seed % 2 == 0 and num_host_blocks > 0)


def test_a_search_takes_its_reports_back_when_a_beam_is_preempted():
    """Two searches beside an older request that grows: beams lose their blocks while others have reported."""
    num_preempted_beams = 0
    for seed in range(40):
        numbers = random.Random(seed)
        config = make_config(block_size=2, num_device_blocks=33, max_num_seqs=8, eos_token_ids=())
        harness = SchedulerHarness(config)
        harness.new("old", [1, 2, 3], arrival_time_s=-1.0, max_tokens=60)
        for index in range(2):
            prompt = [numbers.randrange(10_007) for _ in range(numbers.randint(1, 8))]
            params = SamplingParams(max_tokens=10, temperature=0.0)
            search = BeamSearchParams(3, 2)
            harness.add(AddRequest(f"s{index}", prompt, params, float(index), beam_search=search))
        run(harness, [], numbers)
        num_preempted_beams += harness.scheduler.counters.num_preemptions
    assert num_preempted_beams > 10
