"""The shapes of requests: how long, when, and which opening they share. They come from a distribution or from a trace.

A shape has no text. Shapes never depend on the seed: two runs with other seeds send other text, so no prefix of one is
cached for the other, but ask for equal work at equal times. Lengths are in tokens of the server's model.

Trace files (plain or gzip, told apart by the columns' names, not by the file's):
- Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.
- Mooncake traces: JSON lines with timestamp (ms), input_length, output_length, hash_ids. Equal hash ids stand for an
  equal prefix up to the end of that block of 512 tokens.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512
SHARED_PREFIX_TOKENS = 1000


@dataclass(frozen=True)
class Shape:
    """One request without its text. It opens with the blocks named by `block_ids`, each `num_block_tokens` long."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float = 0.0
    block_ids: tuple[int, ...] = ()
    num_block_tokens: int = 0


def _log_normal(rng: random.Random, median: int, low: int, high: int) -> int:
    return max(low, min(high, round(median * rng.lognormvariate(0, 0.6))))


def mixed(count: int) -> list[Shape]:
    """Chat-like lengths: prompts around 220 tokens and outputs around 120, both log-normal."""
    rng = random.Random("lengths")
    return [Shape(_log_normal(rng, 220, 16, 1024), _log_normal(rng, 120, 8, 400)) for _ in range(count)]


def shared_prefix(count: int) -> list[Shape]:
    """One system prompt of 1,000 tokens, questions of 30, answers of 64."""
    return [Shape(SHARED_PREFIX_TOKENS + 30, 64, 0.0, (0,), SHARED_PREFIX_TOKENS)] * count


def fixed(count: int, num_prompt_tokens: int, num_output_tokens: int) -> list[Shape]:
    """Return `count` requests of the same lengths."""
    return [Shape(num_prompt_tokens, num_output_tokens)] * count


def read_trace(path: Path, limit: int | None = None) -> list[Shape]:
    """Read the first `limit` requests of a trace, by arrival, the first at 0 s. Raises ValueError for unknown files."""
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rt") if is_compressed else path.open() as lines:
        try:
            shapes = list(itertools.islice(_parse(lines), limit))
        except (KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"{path} is not a trace that we know: {type(problem).__name__}: {problem}") from problem
    if not shapes:
        raise ValueError(f"{path} holds no requests")
    shapes.sort(key=lambda shape: shape.arrival_s)
    return [replace(shape, arrival_s=shape.arrival_s - shapes[0].arrival_s) for shape in shapes]


def _parse(lines: Iterable[str]) -> Iterator[Shape]:
    lines = iter(lines)
    first = next(lines, "")
    lines = itertools.chain([first], lines)
    return _parse_mooncake(lines) if first.startswith("{") else _parse_azure(lines)


def _parse_azure(lines: Iterable[str]) -> Iterator[Shape]:
    for row in csv.DictReader(lines):
        arrival_s = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        yield Shape(max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])), arrival_s)


def _parse_mooncake(lines: Iterable[str]) -> Iterator[Shape]:
    for line in lines:
        row = json.loads(line)
        yield Shape(
            max(1, row["input_length"]),
            max(1, row["output_length"]),
            row["timestamp"] / 1000,
            tuple(row["hash_ids"]),
            MOONCAKE_BLOCK_TOKENS,
        )


def scaled(shape: Shape, length_scale: float, time_scale: float) -> Shape:
    """Multiply lengths and arrival times. Blocks round up, so that they still cover the prompt that they covered."""
    return replace(
        shape,
        num_prompt_tokens=max(1, round(shape.num_prompt_tokens * length_scale)),
        num_output_tokens=max(1, round(shape.num_output_tokens * length_scale)),
        arrival_s=shape.arrival_s * time_scale,
        num_block_tokens=math.ceil(shape.num_block_tokens * length_scale),
    )


def capped(shape: Shape, max_context: int) -> Shape:
    """Fit prompt and output into `max_context` tokens: the output keeps at most half, the prompt loses its end."""
    if shape.num_prompt_tokens + shape.num_output_tokens <= max_context:
        return shape
    num_output_tokens = min(shape.num_output_tokens, max_context // 2)
    num_prompt_tokens = min(shape.num_prompt_tokens, max_context - num_output_tokens)
    return replace(shape, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens)


def at_poisson_arrivals(shapes: list[Shape], rate_per_s: float) -> list[Shape]:
    """Give the shapes exponential gaps of 1 / `rate_per_s` seconds on average, whatever arrivals they had."""
    rng = random.Random("arrivals")
    gaps_s = [0.0] + [rng.expovariate(rate_per_s) for _ in shapes[1:]]
    return [
        replace(shape, arrival_s=arrival_s)
        for shape, arrival_s in zip(shapes, itertools.accumulate(gaps_s), strict=True)
    ]
