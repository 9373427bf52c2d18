"""Workloads are read as they are written, and prompts share exactly what the trace says that they share."""

import gzip
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.api_server.client.shapes import Shape
from octavo.simulator.prompts import STOP_TOKEN_ID, VOCAB_SIZE, private_token_id, prompt_token_ids
from octavo.simulator.settings import Settings, Setup
from octavo.simulator.traces import read_workload, scaled

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:01.5,20,3\n2023-11-16 18:00:00.0,10,0\n"
MOONCAKE = '{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [3, 9]}\n'


def test_azure_traces_come_in_the_order_of_arrival(tmp_path):
    (tmp_path / "trace.csv").write_text(AZURE)
    assert read_workload(str(tmp_path / "trace.csv")) == [Shape(10, 1, 0.0), Shape(20, 3, 1.5)]


def test_mooncake_traces_name_their_blocks(tmp_path):
    with gzip.open(tmp_path / "trace.gz", "wt") as file:
        file.write(MOONCAKE * 2)
    assert read_workload(str(tmp_path / "trace.gz"), 1) == [Shape(700, 5, 0.0, (3, 9), 512)]


def test_equal_requests_need_no_file():
    assert read_workload("fixed:12x7", 3) == [Shape(12, 7)] * 3


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ValueError, match="trace"):
        read_workload(str(tmp_path / "trace"))


def test_settings_shape_the_workload():
    setup = Setup(Settings(trace="fixed:100x40", num_requests=1, length_scale=0.5, max_tokens=8, max_model_len=56))
    assert setup.shapes() == [Shape(36, 8)], "half as long, cut to the context, and no more output than asked for"
    assert setup.max_tokens_of(36) == 8
    assert setup.max_tokens_of(50) == 6


def num_shared_tokens(first: list[int], second: list[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


SHAPES = st.builds(
    lambda block_ids, num_cut, scale: scaled(
        Shape(max(1, 8 * len(block_ids) - num_cut), 1, 0.0, tuple(block_ids), 8), scale, 1.0
    ),
    st.lists(st.integers(0, 2), max_size=4),
    st.integers(-5, 12),
    st.just(1.0),
)


@given(SHAPES, SHAPES)
def test_prompts_share_what_their_blocks_share(first, second):
    first_ids, second_ids = prompt_token_ids(first, 0), prompt_token_ids(second, 1)
    assert (len(first_ids), len(second_ids)) == (first.num_prompt_tokens, second.num_prompt_tokens)
    num_equal_blocks = num_shared_tokens(list(first.block_ids), list(second.block_ids))
    expected = min(num_equal_blocks * 8, first.num_prompt_tokens, second.num_prompt_tokens)
    assert num_shared_tokens(first_ids, second_ids) == expected
    assert all(STOP_TOKEN_ID < token_id < VOCAB_SIZE for token_id in first_ids)


def test_nobody_else_has_a_private_token():
    assert prompt_token_ids(Shape(2, 1), 7) == [private_token_id(7)] * 2
    assert private_token_id(7) not in prompt_token_ids(Shape(600, 1, 0.0, (182_789,), 512), 8)
