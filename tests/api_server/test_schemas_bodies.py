"""Decoding of bodies, without a server: depth, syntax, the text of problems."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.api_server.errors import ApiError
from octavo.api_server.http.body import MAX_DEPTH, decode_body, is_too_deep
from octavo.api_server.openai.chat_schemas import ChatRequest
from octavo.api_server.openai.completion_schemas import CompletionRequest
from octavo.api_server.openai.unsupported import CHAT_NO_OPS, COMPLETION_NO_OPS

DECODER = msgspec.json.Decoder(CompletionRequest)
JSON_VALUES = st.recursive(
    st.none() | st.text('[]{}"\\ab', max_size=5),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text('[{"\\', max_size=3), children, max_size=3)
    ),
    max_leaves=40,
)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(JSON_VALUES, st.integers(MAX_DEPTH - 8, MAX_DEPTH + 2))
def test_depth_is_measured_exactly(value: object, num_levels: int) -> None:
    for level in range(num_levels):
        value = [value] if level % 2 else {"a": value, "b": []}
    body = json.dumps(value).encode()
    assert is_too_deep(body) is (depth_of(value) > MAX_DEPTH)


@pytest.mark.parametrize(
    ("member", "param", "text"),
    [
        ('"temperature": NaN', "temperature", "temperature: not a JSON value at byte"),
        ('"temperature": -Infinity', "temperature", "temperature: not a JSON value at byte"),
        ('"temperature": "1"', "temperature", "temperature: expected number | null, got string"),
        ('"n": true', "n", "n: expected integer | null, got boolean"),
        ('"top_k": 1e400', "top_k", "top_k: number out of range"),
        ('"seed": 99999999999999999999', "seed", "seed: expected integer <= 9223372036854775807"),
        ('"stop": [1]', "stop[0]", "stop[0]: expected string, got integer"),
        ('"x": }', "x", "x: not a JSON value at byte"),
        ('"logit_bias": {"1": NaN}', "logit_bias", "logit_bias: not a JSON value at byte"),
        ('"logit_bias": {"1": 101}', "logit_bias", "logit_bias: expected number <= 100"),
        ('"a": {"b": [{"c": "}\\"{"}]}, "c": [1, {"d": }]', "c", "c: not a JSON value at byte"),
    ],
)
def test_problems_are_named_in_words_of_json(member: str, param: str, text: str) -> None:
    with pytest.raises(ApiError) as problem:
        decode_body(b'{"model": "m", "prompt": "p", ' + member.encode() + b"}", DECODER)
    assert problem.value.param == param
    assert problem.value.message.startswith(text)
    assert problem.value.status == 400


@given(st.binary(max_size=200))
def test_any_bytes_are_a_400_or_a_request(body: bytes) -> None:
    try:
        decode_body(body, DECODER)
    except ApiError as problem:
        status, body = problem.status, problem.to_json()
        assert (status, msgspec.json.decode(body).keys()) == (400, {"error"})


def test_every_unsupported_field_is_declared() -> None:
    assert CHAT_NO_OPS.keys() <= {*ChatRequest.__struct_fields__}
    assert COMPLETION_NO_OPS.keys() <= {*CompletionRequest.__struct_fields__}
