"""Bad words: what is forbidden behind which output, and that the output never has them, one step ahead or not."""

from __future__ import annotations

import itertools

import pytest
from step_driver import StepDriver
from tiny_runner import PROMPTS, VOCAB_SIZE, launch_ahead, make_runner

from octavo.protocol.engine_messages import ErrorCode
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import NO_TOKEN
from octavo.worker.bad_words import forbidden_next, longest_beginning

UNKNOWN = -3  # what a row has for a token that only the device knows


def forbidden(words, end):
    result = forbidden_next(words, end)
    return result.token_ids, result.conditions


def test_a_word_of_one_token_is_always_forbidden():
    assert forbidden([(4,), (9,)], []) == ({4, 9}, [])
    assert forbidden([(4,), (9,)], [UNKNOWN]) == ({4, 9}, [])


@pytest.mark.parametrize(
    ("end", "token_ids"),
    [([1, 2], {3}), ([9, 1, 2], {3}), ([2], set()), ([], set()), ([1, 2, 9], set()), ([2, 1], {7}), ([1], {7})],
)
def test_a_longer_word_forbids_its_last_token_where_the_others_stand(end, token_ids):
    assert forbidden([(1, 2, 3), (1, 7)], end) == (token_ids, [])


def test_a_token_that_is_not_known_is_left_to_the_device():
    """Where all that is known fits; the device looks whether the last one does, for each word."""
    words = [(1, 2, 3), (8, 2, 3), (2, 5), (6, 3)]
    assert forbidden(words, [1, UNKNOWN]) == (set(), [(2, 3), (2, 5), (6, 3)])
    assert forbidden(words, [UNKNOWN]) == (set(), [(2, 5), (6, 3)])


def test_no_more_of_the_output_is_looked_at_than_matters():
    assert longest_beginning([]) == 0
    assert longest_beginning([(1,), (1, 2, 3)]) == 2


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("uses_steady", [False, True])
def test_what_would_be_sampled_is_not(tiny_model, alone, length, uses_steady):
    """A word that the request would say: up to it nothing changes, it does not come, and nobody else minds."""
    expected = alone["r4"]
    word = tuple(expected[4 : 4 + length])
    driver = StepDriver(make_runner(tiny_model), uses_steady=uses_steady)
    driver.add("r3", PROMPTS["r3"])
    driver.add("r4", PROMPTS["r4"], bad_words=(word, (VOCAB_SIZE + 3,), (VOCAB_SIZE, 2)))
    outputs = driver.run_until(12, chunk=50)
    start = next(i for i in range(12) if tuple(expected[i : i + length]) == word)
    assert outputs["r4"][: start + length - 1] == expected[: start + length - 1]
    assert outputs["r4"][start + length - 1] != expected[start + length - 1]
    assert word not in [tuple(outputs["r4"][i : i + length]) for i in range(12)]
    assert outputs["r3"] == alone["r3"]


def test_a_preemption_in_the_middle_of_a_word_changes_nothing(tiny_model, alone):
    words = (tuple(alone["r4"][3:6]), tuple(alone["r4"][1:3]))
    lonely = StepDriver(make_runner(tiny_model))
    lonely.add("r4", PROMPTS["r4"], bad_words=words)
    expected = lonely.run_until(12, chunk=50)["r4"]
    assert expected != alone["r4"]
    for when in range(1, 8):
        driver = StepDriver(make_runner(tiny_model))
        driver.add("r4", PROMPTS["r4"], bad_words=words)
        driver.run_until(when, chunk=50)
        driver.preempt("r4")
        assert driver.run_until(12, chunk=50)["r4"] == expected


def test_with_two_steps_in_flight_the_word_is_forbidden_as_well(tiny_model, alone):
    """The last token of a word's beginning is sampled by the step before, whose result nobody has read."""
    for start, length in itertools.product((0, 3), (2, 3)):
        word = tuple(alone["r4"][start : start + length])
        one_ends_alike = (*(token_id + 1 for token_id in word[:-1]), word[-1])
        params = {"temperature": 0.0, "bad_words": (word, one_ends_alike)}
        driver = StepDriver(make_runner(tiny_model))
        driver.add("a", PROMPTS["r4"], **params)
        expected = driver.run_until(9, chunk=50)["a"]
        results = launch_ahead(make_runner(tiny_model), 9, a=(PROMPTS["r4"], SamplingParams(max_tokens=9, **params)))
        assert [result.sampled_token_ids for result in results] == [[token_id] for token_id in expected]


def test_a_request_whose_words_forbid_everything_fails_alone_and_says_so(tiny_model, alone):
    """Not at once: its second token is the first that nothing is left for."""
    allowed = (3, 5, 9)
    driver = StepDriver(make_runner(tiny_model))
    driver.add("r3", PROMPTS["r3"])
    words = tuple((5, token_id) for token_id in allowed)
    driver.add("r4", PROMPTS["r4"], bad_words=words, allowed_token_ids=allowed, logit_bias=((5, 100.0),))
    assert driver.step(r3=len(PROMPTS["r3"]), r4=len(PROMPTS["r4"])).errors == {}
    assert driver.sampled["r4"] == 5
    output = driver.step(r3=1, r4=1)
    assert output.errors == {"r4": ErrorCode.NOTHING_ALLOWED}
    assert driver.sampled["r4"] == NO_TOKEN
    assert driver.requests["r3"].output == alone["r3"][:2]
