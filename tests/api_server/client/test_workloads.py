"""Shapes and prompts: lengths, arrivals, sharing, and that the same seed gives the same requests."""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from octavo.api_server.client.shapes import (
    SHARED_PREFIX_TOKENS,
    Shape,
    at_poisson_arrivals,
    mixed,
    shared_prefix,
)
from octavo.api_server.client.workloads import Cut, cut_by_characters, with_tokenizer, write_prompts
from octavo.simulator.traces import capped, read_trace, scaled

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,0
2023-11-16 18:15:47.6805900,879,55
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1200, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 3500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 3]},
    {"timestamp": 3500, "input_length": 600, "output_length": 9, "hash_ids": [0, 4]},
]


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> str:
    """A tokenizer of pairs of letters, which opens each prompt with a special token: cuts fall inside words."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:'-▁"
    merges = [(a, b) for a in letters for b in letters if a != "▁" and b != "▁"] + [("▁", a) for a in letters[:-1]]
    vocabulary = {text: i for i, text in enumerate(["<s>", *letters, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(100)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def common_opening(first: str, second: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_mixed_lengths_are_chat_like_and_never_change() -> None:
    shapes = mixed(2000)
    assert statistics.median(shape.num_prompt_tokens for shape in shapes) == pytest.approx(220, rel=0.1)
    assert statistics.median(shape.num_output_tokens for shape in shapes) == pytest.approx(120, rel=0.1)
    assert max(shape.num_prompt_tokens for shape in shapes) <= 1024
    assert mixed(10) == shapes[:10]
    assert [(shape.num_prompt_tokens, shape.num_output_tokens) for shape in shapes[:2]] == [(163, 47), (666, 131)]


def test_an_azure_trace_is_sorted_and_starts_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(AZURE.encode()))
    assert read_trace(path) == [Shape(374, 44, 0.0), Shape(879, 55, 1.0), Shape(396, 1, 4.25)]
    path.write_text(AZURE)
    assert read_trace(path, 1) == [Shape(374, 44, 0.0)]


def write_mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, MOONCAKE)).encode()))
    return path


def test_a_mooncake_trace_keeps_its_blocks(tmp_path: Path) -> None:
    shapes = read_trace(write_mooncake(tmp_path))
    assert [shape.arrival_s for shape in shapes] == [0.0, 2.5, 2.5]
    assert shapes[0] == Shape(1200, 50, 0.0, (0, 1, 2), 512)


@pytest.mark.parametrize(
    "text", ["", "prompt,answer\n1,2\n", '{"a": 1}\n', "TIMESTAMP,ContextTokens,GeneratedTokens\n"]
)
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.csv"):
        read_trace(path)


def test_scales_multiply_lengths_and_times() -> None:
    shape = Shape(1025, 100, 8.0, (0, 1, 2), 512)
    assert scaled(shape, 0.1, 0.5) == Shape(102, 10, 4.0, (0, 1, 2), 52)
    assert scaled(shape, 1.0, 1.0) == shape
    assert scaled(Shape(3, 1), 0.01, 1.0) == Shape(1, 1)


@pytest.mark.parametrize("prompt", [1, 50, 99, 100, 101, 5000])
@pytest.mark.parametrize("output", [1, 40, 50, 60, 5000])
@pytest.mark.parametrize("max_context", [2, 101, 100])
def test_a_capped_request_fits_and_loses_no_more_than_it_must(prompt: int, output: int, max_context: int) -> None:
    shape = capped(Shape(prompt, output), max_context)
    total = shape.num_prompt_tokens + shape.num_output_tokens
    assert 1 <= shape.num_prompt_tokens <= prompt
    assert 1 <= shape.num_output_tokens <= output
    assert total <= max_context
    if prompt + output <= max_context:
        assert shape == Shape(prompt, output)
    else:
        assert shape.num_output_tokens >= min(output, max_context // 2)


def test_poisson_arrivals_have_the_rate_and_always_the_same_times() -> None:
    shapes = at_poisson_arrivals(mixed(4000), 5.0)
    assert shapes[0].arrival_s == 0.0
    assert shapes[-1].arrival_s == pytest.approx(4000 / 5, rel=0.1)
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(shapes)]
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)
    assert shapes == at_poisson_arrivals(mixed(4000), 5.0)


def test_the_same_seed_gives_the_same_requests() -> None:
    shapes = [*mixed(20), *shared_prefix(3)]
    assert write_prompts(shapes, "7", cut_by_characters) == write_prompts(shapes, "7", cut_by_characters)


def test_prompts_share_no_opening_by_chance_and_none_with_another_seed() -> None:
    shapes = mixed(200)
    requests, others = (write_prompts(shapes, seed, cut_by_characters) for seed in ("7", "8"))
    assert [r.num_output_tokens for r in requests] == [r.num_output_tokens for r in others]
    prompts = sorted(request.prompt for request in (*requests, *others))
    assert all(common_opening(a, b) < 20 for a, b in itertools.pairwise(prompts))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 17, 100, 997, 998, 999, 1000])
def test_prompts_have_exactly_the_tokens_that_a_server_counts(tokenizer_path: str, num_tokens: int) -> None:
    shape = Shape(num_tokens, 1)
    tokenizer = Tokenizer.from_file(tokenizer_path)
    tokenizer.no_truncation()
    for request in write_prompts([shape] * 5, "7", with_tokenizer(tokenizer_path)):
        # The special token alone is no prompt, so the shortest has two tokens.
        assert len(tokenizer.encode(request.prompt).ids) == max(2, num_tokens)


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_shared_prefix_is_shared_and_questions_are_not(tokenizer_path: str, is_exact: bool) -> None:
    cut = with_tokenizer(tokenizer_path if is_exact else None)
    first, second = write_prompts(shared_prefix(2), "7", cut)
    shared = common_opening(first.prompt, second.prompt)
    prefix = cut(first.prompt, SHARED_PREFIX_TOKENS)
    assert prefix is not None
    assert len(prefix) <= shared + 2
    assert shared < len(first.prompt)
    assert shared == pytest.approx(len(first.prompt) * 1000 / 1030, rel=0.02)


@pytest.mark.parametrize("length_scale", [1.0, 0.1])
def test_equal_hash_ids_are_equal_text_and_others_are_not(
    tmp_path: Path, tokenizer_path: str, length_scale: float
) -> None:
    shapes = [scaled(shape, length_scale, 1.0) for shape in read_trace(write_mooncake(tmp_path))]
    cut: Cut = with_tokenizer(tokenizer_path)
    first, second, third = (request.prompt for request in write_prompts(shapes, "7", cut))
    for other, num_shared_blocks in ((second, 2), (third, 1)):
        shared = common_opening(first, other)
        expected = cut(first, round(512 * length_scale * num_shared_blocks))
        assert expected is not None
        assert abs(shared - len(expected)) <= 30, "of the seed and the number in a block's first words"
