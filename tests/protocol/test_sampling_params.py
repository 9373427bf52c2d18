"""A SamplingParams that exists is valid, and the error names the field."""

import msgspec
import pytest

from octavo.protocol.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 11),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e30),
        ("top_k", -1),
        ("top_k", 2**40),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("choice_index", -1),
        ("stop_token_ids", (3, -1)),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 101.0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("frequency_penalty", float("nan")),
        ("logit_bias", ((3, 1.0), (3, 2.0))),
        ("logit_bias", ((3, 101.0),)),
        ("logit_bias", ((3, float("nan")),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", tuple((i, 0.0) for i in range(1025))),
        ("bad_words", ((),)),
        ("bad_words", ((1, -2),)),
        ("bad_words", ((1,) * 257,)),
        ("bad_words", ((1,),) * 129),
        ("allowed_token_ids", (4, 3)),
        ("num_logprobs", -2),
        ("num_logprobs", 21),
        ("num_prompt_logprobs", 21),
        ("grammar", "é" * (128 * 1024 + 1)),
        ("grammar_start_token_ids", (3,)),
    ],
)
def test_out_of_range_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field} "):
        SamplingParams(**{"max_tokens": 10, field: value})


def test_an_invalid_value_does_not_pass_the_wire():
    frame = msgspec.msgpack.encode([10, 0, -1.0])
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.msgpack.decode(frame, type=SamplingParams)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_tokens", 1),
        ("ignore_eos", True),
        ("grammar_start_token_ids", (-1,)),
        ("grammar_start_token_ids", tuple(range(17))),
    ],
)
def test_a_grammar_alone_says_where_the_output_ends(field, value):
    with pytest.raises(ValueError, match=f"^{field} "):
        SamplingParams(max_tokens=10, grammar='start: "a"', **{field: value})


def test_a_grammar_passes_the_wire():
    params = SamplingParams(max_tokens=10, grammar='start: "é"', grammar_start_token_ids=(3, 2**31 - 1))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_temperature_zero_is_greedy():
    assert SamplingParams(max_tokens=1, temperature=0.0).is_greedy
    assert not SamplingParams(max_tokens=1, temperature=0.5).is_greedy


def test_only_penalties_are_penalties():
    assert not SamplingParams(max_tokens=1, logit_bias=((3, 100.0),), allowed_token_ids=(3, 4)).has_penalties
    for option in ({"repetition_penalty": 1.1}, {"presence_penalty": -0.5}, {"frequency_penalty": 0.1}):
        assert SamplingParams(max_tokens=1, **option).has_penalties
