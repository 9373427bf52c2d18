"""The simulated worker's totals, against a count of every row after every step."""

import random
from types import SimpleNamespace

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import CachedRequest, CopyKind, NewRequest, SchedulerOutput
from octavo.simulator.cost_model import StepLoad, attention_pairs
from octavo.simulator.prompts import STOP_TOKEN_ID
from octavo.simulator.worker import SimulatedWorker

PARAMS = SamplingParams(max_tokens=100)
BLOCK_SIZE = 4


def make_step(step_id=0, **changes):
    fields = {
        "dropped_request_ids": [],
        "copies": [],
        "new_requests": [],
        "cached_requests": [],
        "steady_left": [],
        "steady_joined": [],
        "num_scheduled_tokens": {},
    }
    return SchedulerOutput(step_id=step_id, **{**fields, **changes})


def make_new(request_id, num_known_tokens, num_blocks, num_computed_tokens=0):
    return NewRequest(request_id, [1] * num_known_tokens, [], PARAMS, list(range(num_blocks)), num_computed_tokens)


def test_a_prompt_in_two_chunks():
    worker = SimulatedWorker(BLOCK_SIZE)
    load, _ = worker.execute(make_step(new_requests=[make_new("a", 6, 2)], num_scheduled_tokens={"a": 4}), [])
    assert load == StepLoad(4, 0, 4, 10)
    assert (worker.num_slots, worker.num_computed_tokens, worker.num_reserved_slots) == (8, 4, 2)
    load, _ = worker.execute(make_step(num_scheduled_tokens={"a": 2}), [])
    assert load == StepLoad(2, 0, 6, 11)
    assert (worker.num_slots, worker.num_computed_tokens, worker.num_reserved_slots) == (8, 6, 0)


def test_copies_are_counted_by_where_they_go():
    copies = [(CopyKind.SWAP_OUT, 0, 0), (CopyKind.SWAP_IN, 0, 1), (CopyKind.DEVICE, 0, 2)]
    load, _ = SimulatedWorker(BLOCK_SIZE).execute(make_step(copies=copies), [])
    assert (load.num_link_copies, load.num_device_copies) == (2, 1)


def test_the_last_output_token_is_the_stop_token():
    worker = SimulatedWorker(BLOCK_SIZE)
    worker.expect("a", 3, 77)
    worker.expect("b", 1, 88)
    sampling = [SimpleNamespace(request_id="b"), SimpleNamespace(request_id="a")]
    assert worker.execute(make_step(5), sampling)[1].sampled_token_ids == [STOP_TOKEN_ID, 77]
    assert [worker.execute(make_step(), sampling[1:])[1].sampled_token_ids for _ in range(2)] == [[77], [STOP_TOKEN_ID]]
    assert worker.execute(make_step(5), sampling[1:])[1].sampled_token_ids == [77], "computed ahead, thrown away"


class NaiveRows:
    """The same, by touching every row at every step."""

    def __init__(self):
        self.rows = {}  # request_id -> [slots, computed, known]
        self.steady = []

    def execute(self, step):
        for request_id in step.dropped_request_ids + [new.request_id for new in step.new_requests]:
            self.rows.pop(request_id, None)
            self.steady = [other for other in self.steady if other != request_id]
        for new in step.new_requests:
            num_slots = BLOCK_SIZE * len(new.block_ids)
            self.rows[new.request_id] = [num_slots, new.num_computed_tokens, len(new.prompt_token_ids)]
        for cached in step.cached_requests:
            self.rows[cached.request_id][0] += BLOCK_SIZE * len(cached.new_block_ids)
        self.steady = [other for other in self.steady if other not in step.steady_left] + step.steady_joined
        chunks = {**dict.fromkeys(self.steady, 1), **step.num_scheduled_tokens}
        num_pairs = sum(attention_pairs(self.rows[name][1], num_tokens) for name, num_tokens in chunks.items())
        for name, num_tokens in chunks.items():
            self.rows[name][1] += num_tokens
        return StepLoad(sum(chunks.values()), 0, sum(self.rows[name][1] for name in chunks), num_pairs)

    def lacks_one(self, name):
        _, num_computed, num_known = self.rows[name]
        return num_computed >= num_known - 1

    def totals(self):
        reserved = sum(max(0, min(known, slots) - computed) for slots, computed, known in self.rows.values())
        return sum(row[0] for row in self.rows.values()), sum(row[1] for row in self.rows.values()), reserved


def random_step(numbers, step_id, naive):
    """Any legal change of up to six rows; a row that is not steady may pause."""
    changes = {"new_requests": [], "cached_requests": [], "steady_left": [], "steady_joined": []}
    chunks, dropped = {}, []
    for name in "abcdef":
        is_steady = name in naive.steady
        choice = numbers.random()
        if name not in naive.rows or choice < 0.05:
            num_known, num_blocks = numbers.randint(1, 20), numbers.randint(1, 6)
            num_computed = numbers.randrange(min(num_known, BLOCK_SIZE * num_blocks))
            changes["new_requests"].append(make_new(name, num_known, num_blocks, num_computed))
            if num_computed == num_known - 1 and choice < 0.5:
                changes["steady_joined"].append(name)
            else:
                chunks[name] = numbers.randint(1, num_known - num_computed)
        elif choice < 0.1:
            dropped.append(name)
        elif choice < 0.3:
            changes["cached_requests"].append(CachedRequest(name, [0] * numbers.randint(0, 2)))
        elif is_steady and choice < 0.4:
            changes["steady_left"].append(name)
        elif not is_steady and choice < 0.7 and naive.lacks_one(name):
            changes["steady_joined"].append(name)
        elif not is_steady and choice < 0.9:
            chunks[name] = numbers.randint(1, 5)
    return make_step(step_id, dropped_request_ids=dropped, num_scheduled_tokens=chunks, **changes)


def test_totals_are_those_of_a_count_by_row():
    numbers = random.Random(7)
    worker, naive = SimulatedWorker(BLOCK_SIZE), NaiveRows()
    for step_id in range(2000):
        step = random_step(numbers, step_id, naive)
        load, _ = worker.execute(step, [])
        assert load == naive.execute(step)
        assert (worker.num_slots, worker.num_computed_tokens, worker.num_reserved_slots) == naive.totals()
