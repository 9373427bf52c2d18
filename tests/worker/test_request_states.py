"""The rows, and the order of the steady ones against a plain list."""

from __future__ import annotations

import random

import pytest

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import CachedRequest, NewRequest
from octavo.worker.request_states import RequestStates

PARAMS = SamplingParams(max_tokens=5)


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
    assert states.token_ids[row, :4].tolist() == [1, 2, 3, 4]


def test_a_request_grows_by_blocks_and_by_tokens_that_it_does_not_sample():
    states = RequestStates(2, 12, 4)
    states.assign(NewRequest("a", [1, 2], [7], SamplingParams(max_tokens=5, num_candidates=2), [3], 3))
    states.grow(CachedRequest("a", [8, 2], [9]))
    states.grow(CachedRequest("a", [], [4]))
    row = states.rows["a"]
    assert states.token_ids[row, : states.num_tokens[row]].tolist() == [1, 2, 7, 9, 4]
    assert states.block_tables[row, : states.num_blocks[row]].tolist() == [3, 8, 2]
    assert states.num_prompt_tokens[row] == 2


def test_every_option_of_a_row_is_replaced():
    states = RequestStates(1, 8, 4)
    every_option = {
        "min_tokens": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 2**63 - 1,
        "choice_index": 4,
        "num_candidates": 9,
        "stop_token_ids": (5,),
    }
    states.assign(NewRequest("a", [1], [], SamplingParams(max_tokens=5, **every_option), [3], 0))
    names = {"temperature": "temperatures", "top_k": "top_ks", "top_p": "top_ps", "min_p": "min_ps", "seed": "seeds"}
    names["choice_index"] = "choice_indices"
    for params in (SamplingParams(max_tokens=5, **every_option), PARAMS):
        states.assign(NewRequest("a", [1], [], params, [3], 0))
        for option in every_option:
            assert getattr(states.sampling, names.get(option, option))[0] == getattr(params, option)


def test_too_many_requests_are_an_error():
    states = RequestStates(1, 8, 4)
    states.assign(NewRequest("a", [1], [], PARAMS, [3], 0))
    with pytest.raises(IndexError):
        states.assign(NewRequest("b", [1], [], PARAMS, [4], 0))


@pytest.mark.parametrize("seed", range(30))
def test_steady_requests_stand_in_the_order_in_which_they_joined(seed):
    """Random steps drop, replace, add, leave and join, several of them for one request in a step."""
    rng = random.Random(seed)
    max_num_seqs = rng.choice([1, 3, 12])
    states = RequestStates(max_num_seqs, 8, 4)
    names, live, steady = [f"r{i}" for i in range(15)], set(), []
    for _ in range(60):
        dropped = [name for name in names if rng.random() < 0.15]
        live -= set(dropped)
        steady = [name for name in steady if name not in dropped]
        candidates = rng.sample(names, rng.randint(0, 5))
        new = [name for name in candidates if name in live or rng.random() < 0.9]
        new = [name for index, name in enumerate(new) if len(live | set(new[: index + 1])) <= max_num_seqs]
        live |= set(new)
        steady = [name for name in steady if name not in new]
        left = [name for name in steady if rng.random() < 0.2]
        steady = [name for name in steady if name not in left]
        joined = rng.sample(sorted(live - set(steady)), rng.randint(0, len(live) - len(steady)))
        steady += joined

        for name in dropped:
            states.drop(name)
        for name in new:
            states.assign(NewRequest(name, [1], [], PARAMS, [3], 0))
        states.update_steady(left, joined)
        assert [states.request_ids[row] for row in states.steady_rows] == steady
        assert {name for name, row in states.rows.items() if states.is_steady[row]} == set(steady)
        assert states.rows.keys() == live
        assert states.is_steady.sum() == len(steady)
