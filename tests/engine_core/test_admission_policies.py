"""Who fits: each policy by hand and against a simulation of the future; and that preemptions are bounded."""

import random
from dataclasses import dataclass, field

import pytest
from scheduler_harness import SchedulerHarness, make_config

from octavo.engine_core.admission_policy import (
    MAX_REMEMBERED_LENGTHS,
    OutputLengths,
    Situation,
    has_room,
    needs_predicted_peak,
    needs_reserve_all,
    needs_watermark,
)
from octavo.engine_core.kv_cache_manager import NO_PREFIX, KVCacheManager
from octavo.engine_core.request import Request
from octavo.protocol.config import AdmissionPolicy, PreemptionMode
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams

MODEL = make_config(max_model_len=10_000).model


def make_request(number, num_prompt_tokens, max_tokens, num_output_tokens=0):
    command = AddRequest(
        f"r{number}", [1] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens), 0.0, [1] * num_output_tokens
    )
    return Request(command, (0, 0.0, number, 0), MODEL, b"root")


def lengths_of(*num_output_tokens):
    lengths = OutputLengths()
    for number in num_output_tokens:
        lengths.add(number)
    return lengths


def situation_of(request, running, num_blocks=20, block_size=4, lengths=None, pinned=()):
    """The running ones hold the blocks of their known tokens."""
    manager = KVCacheManager(num_blocks, block_size)
    for other in running:
        assert manager.add_table(other, NO_PREFIX, other.num_tokens) is not None
    to_take = manager.num_blocks_to_take(NO_PREFIX, request.num_tokens)
    return Situation(request, to_take, running, pinned, manager, lengths or OutputLengths())


def test_reserve_all_counts_what_everybody_may_ever_take():
    """Blocks of 4. New: 5 + 8 tokens, of which 12 take slots: 3. Running: 3 more of one; another is at its end."""
    running = [make_request(1, 4, 13), make_request(2, 7, 2)]
    situation = situation_of(make_request(3, 5, 8), running)
    assert situation.num_own_blocks_ever() == 3
    assert situation.num_blocks_ever(running) == (4 - 1) + 0
    assert needs_reserve_all(situation) == 6


def test_reserve_all_does_not_count_twice_what_the_request_takes_at_once():
    situation = situation_of(make_request(1, 8, 1), [])
    assert (situation.num_blocks_to_take, needs_reserve_all(situation)) == (2, 2)


def test_watermark_is_a_block_for_everybody():
    running = [make_request(1, 4, 13), make_request(2, 7, 2)]
    assert needs_watermark(situation_of(make_request(3, 5, 8), running)) == 2 + 3


def test_predicted_peak_by_hand():
    """Blocks of 1; outputs were 10 long. Running: 6 tokens, 6 to come. New: 3 tokens, 10 to come.

    At the first end the one has 12 tokens and the other 9; later it is alone with 13. So 21 are needed, 6 are in use.
    """
    running = [make_request(1, 2, 99, num_output_tokens=4)]
    situation = situation_of(make_request(2, 3, 99), running, block_size=1, lengths=lengths_of(10, 10, 10))
    assert needs_predicted_peak(situation) == 21 - 6


def brute_force_peak(everybody):
    """Step by step: everybody grows by one token until its end, and then holds nothing."""
    left = {request: num_remaining_tokens for num_remaining_tokens, request in everybody}
    tokens = {request: request.num_prompt_tokens + request.num_output_tokens for request in left}
    most = sum(tokens.values())
    while left:
        for request in [request for request, num_tokens in left.items() if num_tokens == 0]:
            del left[request], tokens[request]
        for request in left:
            left[request] -= 1
            tokens[request] += 1
        most = max(most, sum(tokens.values()))
    return most


@pytest.mark.parametrize("seed", range(60))
def test_the_predicted_peak_is_that_of_a_simulated_future(seed):
    numbers = random.Random(seed)
    lengths = lengths_of(*(numbers.randint(1, 60) for _ in range(numbers.choice([0, 1, 30]))))
    requests = [
        make_request(number, numbers.randint(1, 40), numbers.randint(41, 80), numbers.randint(0, 40))
        for number in range(numbers.randint(1, 9))
    ]
    *running, new = requests
    situation = situation_of(new, running, num_blocks=1000, block_size=1, lengths=lengths)
    peak = brute_force_peak([(lengths.expected_remaining(request), request) for request in requests])
    assert needs_predicted_peak(situation) == peak - situation.manager.num_used_blocks


def test_expected_lengths():
    lengths = lengths_of(2, 4, 9)
    assert lengths.expected_remaining(make_request(1, 5, 99)) == 5  # mean of 2, 4, 9
    assert lengths.expected_remaining(make_request(1, 5, 99, 2)) == 5  # mean of 4, 9 is 6.5: rounded up, less 2
    assert lengths.expected_remaining(make_request(1, 5, 99, 4)) == 5
    assert lengths.expected_remaining(make_request(1, 5, 99, 9)) == 90, "longer than all that is known"
    assert lengths.expected_remaining(make_request(1, 5, 3)) == 3, "no more than it may have"


def test_only_the_latest_lengths_count():
    lengths = OutputLengths()
    for _ in range(MAX_REMEMBERED_LENGTHS):
        lengths.add(1000)
    for _ in range(MAX_REMEMBERED_LENGTHS):
        lengths.add(8)
    assert lengths.expected_remaining(make_request(1, 5, 5000)) == 8
    assert len(lengths._sorted) == len(lengths._latest) == MAX_REMEMBERED_LENGTHS


@pytest.mark.parametrize("policy", AdmissionPolicy)
def test_who_would_be_alone_needs_no_margin(policy):
    situation = situation_of(make_request(1, 8, 100), [], num_blocks=2)
    assert has_room(situation, policy, 4, is_alone=True)
    assert not has_room(situation, policy, 4, is_alone=False)
    assert not has_room(situation_of(make_request(1, 9, 100), [], num_blocks=2), policy, 4, is_alone=True)


def test_who_was_preempted_too_often_waits_for_all_that_it_and_older_ones_may_need():
    """Blocks of 1: the older one may take 10 more, the younger one's needs do not count; 5 + 9 of its own."""
    older, victim, younger = make_request(1, 1, 11), make_request(2, 5, 10), make_request(3, 1, 99)
    for num_blocks, is_admitted in ((2 + 14 + 10, True), (2 + 14 + 9, False)):
        situation = situation_of(victim, [older, younger], num_blocks, block_size=1)
        victim.num_preemptions = 3
        assert has_room(situation, AdmissionPolicy.WATERMARK, 4, is_alone=False)
        victim.num_preemptions = 4
        assert has_room(situation, AdmissionPolicy.WATERMARK, 4, is_alone=False) is is_admitted


@dataclass
class Workload:
    """Requests that come in order of arrival, more than memory can hold."""

    seed: int
    max_preemptions: int
    num_most_preemptions: int = 0
    num_preemptions: int = 0
    numbers: random.Random = field(init=False)

    def run(self):
        numbers = self.numbers = random.Random(self.seed)
        block_size = numbers.choice([1, 2, 4])
        config = make_config(
            block_size=block_size,
            num_device_blocks=numbers.randint(30, 60) // block_size,
            num_host_blocks=numbers.choice([0, 30]) // block_size,
            max_num_seqs=numbers.choice([4, 8]),
            max_steps_in_flight=numbers.choice([1, 2]),
            max_tokens_per_request=numbers.choice([None, 4]),
            enable_prefix_caching=numbers.random() < 0.5,
            preemption_mode=numbers.choice(list(PreemptionMode)),
            admission_policy=numbers.choice([AdmissionPolicy.WATERMARK, AdmissionPolicy.PREDICTED_PEAK]),
            max_preemptions_per_request=self.max_preemptions,
            eos_token_ids=numbers.choice([(), (2,)]),
        )
        harness = SchedulerHarness(config)
        commands = [
            AddRequest(
                f"r{number}",
                [numbers.randrange(10_007) for _ in range(numbers.randint(1, 8))],
                SamplingParams(max_tokens=numbers.randint(1, 28), temperature=0.0),
                float(number),
            )
            for number in range(14)
        ]
        requests = {}
        while commands or harness.has_work():
            while commands and numbers.random() < 0.4:
                harness.add(commands.pop(0))
            requests.update(harness.scheduler.requests)
            if harness.can_schedule() and numbers.random() < 0.7:
                harness.schedule()
            elif harness.results:
                harness.deliver()
        harness.check_outputs()
        self.num_preemptions += harness.scheduler.counters.num_preemptions
        self.num_most_preemptions = max(request.num_preemptions for request in requests.values())


def test_nobody_is_preempted_more_often_than_allowed():
    """First come, first served, no two prompts alike: after the last preemption all that older ones need is there."""
    num_preemptions, num_at_the_limit = 0, 0
    for seed in range(240):
        workload = Workload(seed, max_preemptions=1 + seed % 3)
        workload.run()
        assert workload.num_most_preemptions <= workload.max_preemptions
        num_preemptions += workload.num_preemptions
        num_at_the_limit += workload.num_most_preemptions == workload.max_preemptions
    assert num_preemptions > 1000
    assert num_at_the_limit > 100, "the rule was hardly needed"


@pytest.mark.parametrize("seed", range(20))
def test_reserve_all_never_preempts(seed):
    numbers = random.Random(seed)
    harness = SchedulerHarness(
        make_config(
            block_size=2, num_device_blocks=24, admission_policy=AdmissionPolicy.RESERVE_ALL, eos_token_ids=(2,)
        )
    )
    for number in range(12):
        prompt = [numbers.randrange(3) for _ in range(numbers.randint(1, 9))]
        harness.new(f"r{number}", prompt, float(number), max_tokens=numbers.randint(1, 30), seed=number)
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.counters.num_preemptions == 0
