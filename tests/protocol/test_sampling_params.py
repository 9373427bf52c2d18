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
    ],
)
def test_out_of_range_names_the_field(field, value):
    with pytest.raises(ValueError, match=f"^{field} "):
        SamplingParams(**{"max_tokens": 10, field: value})


def test_an_invalid_value_does_not_pass_the_wire():
    frame = msgspec.msgpack.encode([10, 0, -1.0])
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.msgpack.decode(frame, type=SamplingParams)


def test_temperature_zero_is_greedy():
    assert SamplingParams(max_tokens=1, temperature=0.0).is_greedy
    assert not SamplingParams(max_tokens=1, temperature=0.5).is_greedy
