"""The tensors of a step, against a plain reading of the rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import NewRequest
from octavo.worker.input_batch import make_input_batch
from octavo.worker.request_states import RequestStates

PARAMS = SamplingParams(max_tokens=5)


def test_a_step_as_in_the_picture():
    """The example of the module's docstring, with blocks of 4."""
    states = RequestStates(8, 32, 4)
    states.assign(NewRequest("b", [40, 41, 42], [43, 44], PARAMS, [9, 2], 4))
    states.assign(NewRequest("a", list(range(10)), [], PARAMS, [1, 5, 3], 7))
    states.assign(NewRequest("c", [20, 21, 22, 23, 24], [], PARAMS, [7], 0))
    batch = make_input_batch(states, {"a": 3, "b": 1, "c": 4}, 4)

    assert batch.token_ids.tolist() == [7, 8, 9, 44, 20, 21, 22, 23]
    assert batch.positions.tolist() == [7, 8, 9, 4, 0, 1, 2, 3]
    assert batch.query_start_loc.tolist() == [0, 3, 4, 8]
    assert batch.seq_lens.tolist() == [10, 5, 4]
    assert batch.block_tables.tolist() == [[1, 5, 3], [9, 2, 0], [7, 0, 0]]
    assert batch.slot_mapping.tolist() == [5 * 4 + 3, 3 * 4, 3 * 4 + 1, 2 * 4, 28, 29, 30, 31]
    assert batch.sampled_requests.tolist() == [0, 1]
    assert batch.sampled_tokens.tolist() == [2, 3]
    narrow = {"query_start_loc", "seq_lens", "block_tables"}
    for name, array in batch._asdict().items():
        assert array.dtype == (np.int32 if name in narrow else np.int64), name


def test_steady_requests_come_first():
    states = RequestStates(8, 32, 4)
    for index, name in enumerate("abcd"):
        states.assign(NewRequest(name, [10 * index, 10 * index + 1], [], PARAMS, [index], 1 if name in "bd" else 0))
    states.update_steady([], ["d", "b"])
    batch = make_input_batch(states, {"c": 1, "a": 2}, 4)
    assert [states.request_ids[row] for row in batch.rows] == ["d", "b", "c", "a"]
    assert batch.num_scheduled_tokens.tolist() == [1, 1, 1, 2]
    assert batch.token_ids.tolist() == [31, 11, 20, 0, 1]
    assert batch.slot_mapping.tolist() == [13, 5, 8, 0, 1]
    assert batch.sampled_requests.tolist() == [0, 1, 3]
    assert batch.sampled_tokens.tolist() == [0, 1, 4]


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_equal_a_plain_reading(seed):
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 16])
    states = RequestStates(12, 100, block_size)
    requests, counts = {}, {}
    for index in range(rng.randint(1, 12)):
        tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 90))]
        num_prompt = rng.randint(1, len(tokens))
        blocks = [rng.randrange(500) for _ in range(-(-len(tokens) // block_size))]
        num_computed = rng.choice([rng.randrange(len(tokens)), len(tokens) - 1])
        name = f"r{index}"
        states.assign(NewRequest(name, tokens[:num_prompt], tokens[num_prompt:], PARAMS, blocks, num_computed))
        counts[name] = rng.randint(1, len(tokens) - num_computed)
        requests[name] = (tokens, blocks, num_computed)
    lacking_one = [name for name, (tokens, _, num_computed) in requests.items() if num_computed == len(tokens) - 1]
    steady = rng.sample(lacking_one, rng.randint(0, len(lacking_one)))
    states.update_steady([], steady)
    named = {name: count for name, count in counts.items() if name not in steady}

    batch = make_input_batch(states, named, block_size)
    counts = {name: counts[name] for name in [*steady, *named]}
    token_ids, positions, slots, sampled = [], [], [], []
    for index, (name, count) in enumerate(counts.items()):
        tokens, blocks, num_computed = requests[name]
        for position in range(num_computed, num_computed + count):
            token_ids.append(tokens[position])
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
        if num_computed + count == len(tokens):
            sampled.append((index, len(token_ids) - 1))
        used = -(-(num_computed + count) // block_size)
        assert batch.block_tables[index, :used].tolist() == blocks[:used]
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert list(zip(batch.sampled_requests.tolist(), batch.sampled_tokens.tolist(), strict=True)) == sampled


def test_nothing_to_compute():
    states = RequestStates(4, 32, 4)
    states.assign(NewRequest("a", [1, 2], [], PARAMS, [3], 0))
    assert make_input_batch(states, {}, 4) is None
