"""The tensors of a step, against a plain reading of the rows; and the rows themselves."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import NewRequest
from octavo.worker.input_batch import make_input_batch
from octavo.worker.request_states import RequestStates

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_tokens=5)


def test_a_step_as_in_the_picture():
    """The example of the module's docstring, with blocks of 4."""
    states = RequestStates(8, 32, 4)
    states.assign(NewRequest("b", [40, 41, 42], [43, 44], PARAMS, [9, 2], 4))
    states.assign(NewRequest("a", list(range(10)), [], PARAMS, [1, 5, 3], 7))
    states.assign(NewRequest("c", [20, 21, 22, 23, 24], [], PARAMS, [7], 0))
    batch = make_input_batch(states, {"a": 3, "b": 1, "c": 4}, 4, CPU)

    assert batch.token_ids.tolist() == [7, 8, 9, 44, 20, 21, 22, 23]
    assert batch.positions.tolist() == [7, 8, 9, 4, 0, 1, 2, 3]
    metadata = batch.metadata
    assert metadata.query_start_loc.tolist() == [0, 3, 4, 8]
    assert metadata.seq_lens.tolist() == [10, 5, 4]
    assert metadata.block_tables.tolist() == [[1, 5, 3], [9, 2, 0], [7, 0, 0]]
    assert metadata.slot_mapping.tolist() == [5 * 4 + 3, 3 * 4, 3 * 4 + 1, 2 * 4, 28, 29, 30, 31]
    assert batch.sampled_requests.tolist() == [0, 1]
    assert batch.sampled_tokens.tolist() == [2, 3]
    dtypes = {name: getattr(metadata, name).dtype for name in metadata._fields}
    slots = dtypes.pop("slot_mapping")
    assert slots == batch.token_ids.dtype == batch.positions.dtype == batch.sampled_tokens.dtype == torch.int64
    assert set(dtypes.values()) == {torch.int32}


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
        num_computed = rng.randrange(len(tokens))
        name = f"r{index}"
        states.assign(NewRequest(name, tokens[:num_prompt], tokens[num_prompt:], PARAMS, blocks, num_computed))
        counts[name] = rng.randint(1, len(tokens) - num_computed)
        requests[name] = (tokens, blocks, num_computed)

    batch = make_input_batch(states, counts, block_size, CPU)
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
        assert batch.metadata.block_tables[index, :used].tolist() == blocks[:used]
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.metadata.slot_mapping.tolist() == slots
    assert list(zip(batch.sampled_requests.tolist(), batch.sampled_tokens.tolist(), strict=True)) == sampled


def test_failed_requests_are_left_out():
    states = RequestStates(4, 32, 4)
    for name in ("a", "b"):
        states.assign(NewRequest(name, [1, 2], [], PARAMS, [3], 0))
    states.has_failed[states.rows["a"]] = True
    assert make_input_batch(states, {"a": 2, "b": 2}, 4, CPU).request_ids == ["b"]
    assert make_input_batch(states, {"a": 2}, 4, CPU) is None
    assert make_input_batch(states, {}, 4, CPU) is None


def test_rows_are_reused_and_dropping_is_idempotent():
    states = RequestStates(2, 8, 4)
    for round_number in range(5):
        for name in ("a", "b"):
            states.assign(NewRequest(f"{name}{round_number}", [1], [2], PARAMS, [3], 0))
        assert len(set(states.rows.values())) == 2
        for name in ("a", "b"):
            states.drop(f"{name}{round_number}")
            states.drop(f"{name}{round_number}")
    assert sorted(states.free_rows) == [0, 1]


def test_a_request_that_is_sent_again_keeps_one_row():
    states = RequestStates(2, 8, 4)
    states.assign(NewRequest("a", [1, 2, 3], [], PARAMS, [3], 2))
    states.assign(NewRequest("a", [1, 2, 3], [4], PARAMS, [5, 6], 0))
    row = states.rows["a"]
    assert len(states.free_rows) == 1
    assert (states.num_tokens[row], states.num_prompt_tokens[row], states.num_computed_tokens[row]) == (4, 3, 0)
    assert states.block_tables[row].tolist() == [5, 6, 0]


def test_too_many_requests_are_an_error():
    states = RequestStates(1, 8, 4)
    states.assign(NewRequest("a", [1], [], PARAMS, [3], 0))
    with pytest.raises(IndexError):
        states.assign(NewRequest("b", [1], [], PARAMS, [4], 0))
