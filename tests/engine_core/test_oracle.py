"""The oracle itself: it must notice what it is there to notice, or all tests that use it are worth nothing."""

import pytest
from oracle import POISON, ContractError, OracleModel, expected_output

from octavo.protocol.engine_messages import FinishReason
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import CachedRequest, CopyKind, NewRequest, SchedulerOutput

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]
VOCAB_SIZE = 10_007


def make_model(**options):
    return OracleModel(
        **{
            "num_blocks": 8,
            "block_size": 2,
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": (),
            "max_num_seqs": 4,
            **options,
        }
    )


def step(num_scheduled_tokens, new=(), cached=(), dropped=(), copies=(), joined=()):
    return SchedulerOutput(
        0, list(dropped), list(copies), list(new), list(cached), [], list(joined), num_scheduled_tokens
    )


def row(block_ids, request_id="a", prompt=PROMPT, output=(), num_computed_tokens=0, params=GREEDY):
    return NewRequest(request_id, list(prompt), list(output), params, list(block_ids), num_computed_tokens)


def expect(params=GREEDY, prompt=PROMPT, eos_token_ids=(), max_model_len=100):
    return expected_output(prompt, params, VOCAB_SIZE, eos_token_ids, max_model_len)


def test_it_computes_what_is_expected_whatever_the_blocks():
    model = make_model()
    sampled = model.execute(step({"a": 5}, [row([6, 2, 5])])).sampled_token_ids
    sampled += model.execute(step({"a": 1})).sampled_token_ids
    sampled += model.execute(step({"a": 1}, cached=[CachedRequest("a", [0])])).sampled_token_ids
    assert sampled == expect()[0][:3]


def test_chunks_change_nothing_and_do_not_sample():
    model = make_model()
    assert model.execute(step({"a": 3}, [row([6, 2, 5])])).sampled_token_ids == []
    assert model.execute(step({"a": 2})).sampled_token_ids == expect()[0][:1]


def test_a_resumed_row_goes_on_at_its_position():
    output = expect(SamplingParams(max_tokens=8, seed=3))[0]
    params = SamplingParams(max_tokens=8, seed=3)
    result = make_model().execute(step({"a": 8}, [row([1, 2, 3, 4], output=output[:3], params=params)]))
    assert result.sampled_token_ids == output[3:4]


@pytest.mark.parametrize("wrong_slot", range(5))
def test_every_slot_counts(wrong_slot):
    model = make_model()
    model.execute(step({"a": 5}, [row([0, 1, 2])]))
    model.slots[wrong_slot] ^= 1
    assert model.execute(step({"a": 1})).sampled_token_ids != expect()[0][1:2]


@pytest.mark.parametrize("wrong_table", [[1, 0, 2], [0, 1, 3], [0, 0, 2], [7, 1, 2]])
def test_every_block_counts(wrong_table):
    model = make_model()
    model.execute(step({"a": 5}, [row([0, 1, 2])]))
    model.rows["a"].block_table = wrong_table
    assert model.execute(step({"a": 1})).sampled_token_ids != expect()[0][1:2]


def test_a_block_with_two_owners_shows():
    model = make_model()
    model.execute(step({"a": 5, "b": 5}, [row([0, 1, 2]), row([3, 4, 2], "b", prompt=[9, 8, 7, 6, 5])]))
    assert model.execute(step({"a": 1})).sampled_token_ids != expect()[0][1:2]


def test_a_copy_takes_the_content_along_and_a_wrong_one_shows():
    for source, is_right in ((2, True), (3, False)):
        model = make_model(num_host_blocks=2)
        model.execute(step({"a": 5}, [row([0, 1, 2])]))
        copies = [(CopyKind.SWAP_OUT, source, 1), (CopyKind.SWAP_IN, 1, 5), (CopyKind.DEVICE, 5, 6)]
        moved = row([0, 1, 6], output=expect()[0][:1], num_computed_tokens=5)
        sampled = model.execute(step({"a": 1}, [moved], dropped=["a"], copies=copies)).sampled_token_ids
        assert (sampled == expect()[0][1:2]) is is_right


def test_a_wrong_num_computed_tokens_shows():
    result = make_model().execute(step({"a": 4}, [row([0, 1, 2], num_computed_tokens=1)]))
    assert result.sampled_token_ids != expect()[0][:1]


def test_a_lost_token_shows():
    model = make_model()
    output = expect()[0]
    result = model.execute(step({"a": 6}, [row([0, 1, 2], output=output[1:2])]))
    assert result.sampled_token_ids != output[2:3]


def test_new_blocks_hold_nothing_that_could_be_read_by_mistake():
    model = make_model()
    model.execute(step({"a": 5}, [row([0, 1, 2])]))
    model.execute(step({"b": 1}, [row([0, 1, 2], "b", num_computed_tokens=2)], dropped=["a"]))
    assert POISON not in model.slots[0:3]
    assert list(model.slots[3:6]) == [POISON] * 3


@pytest.mark.parametrize(
    "impossible",
    [
        step({"a": 1}),
        step({"a": 6}, [row([0, 1, 2])]),
        step({"a": 0}, [row([0, 1, 2])]),
        step({"a": 5}, [row([0, 1])]),
        step({}, dropped=["a"]),
        step({}, cached=[CachedRequest("a", [1])]),
        step({}, [row([0]), row([1])]),
        step({}, [row([0], str(i)) for i in range(5)]),
        step({}, joined=["a"]),
        step({"a": 5}, [row([0, 1, 2])], joined=["a"]),
        step({}, copies=[(CopyKind.SWAP_OUT, 0, 0)]),
        step({}, copies=[(CopyKind.DEVICE, 0, 8)]),
    ],
)
def test_a_step_that_no_worker_could_run_is_refused(impossible):
    with pytest.raises(ContractError):
        make_model().execute(impossible)


def test_greedy_ignores_the_seed_and_sampling_depends_on_all_of_it():
    assert expect(SamplingParams(8, temperature=0, seed=1)) == expect(SamplingParams(8, temperature=0, seed=2))
    outputs = [
        expect(SamplingParams(8, seed=1))[0],
        expect(SamplingParams(8, seed=2))[0],
        expect(SamplingParams(8, seed=1, choice_index=1))[0],
        expect()[0],
    ]
    assert len({tuple(output) for output in outputs}) == 4
    assert expect(SamplingParams(8, seed=1))[0] == outputs[0]


def test_ends_come_naturally_and_are_masked_before_min_tokens():
    prompts = [[n] for n in range(400)]
    ends = [expect(SamplingParams(20, temperature=0), p, (2,)) for p in prompts]
    stopped = [(p, out) for p, (out, reason) in zip(prompts, ends, strict=True) if reason is FinishReason.STOP]
    assert 40 < len(stopped) < 360
    for prompt, output in stopped:
        assert output[-1] == 2
        longer, _ = expect(SamplingParams(20, min_tokens=len(output), temperature=0), prompt, (2,))
        assert longer[: len(output) - 1] == output[:-1]
        assert len(longer) > len(output) or len(output) == 20
        assert 2 not in longer[: len(output)]
    ignored = [expect(SamplingParams(20, temperature=0, ignore_eos=True), p, (2,)) for p in prompts]
    assert all((len(output), reason) == (20, FinishReason.LENGTH) for output, reason in ignored)


def test_stop_tokens_and_the_context_end_it_too():
    output, _ = expect()
    assert expect(SamplingParams(8, temperature=0, stop_token_ids=(output[3],))) == (output[:4], FinishReason.STOP)
    assert expect(max_model_len=8) == (output[:3], FinishReason.LENGTH)
