"""The requests of a workload: how long, when, and which opening they share.

A shape has no text. A workload is a trace file (plain or gzip; told apart by what is in it), or `fixed:PROMPTxOUTPUT`,
requests of equal lengths that all come at once:
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
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from octavo.api_server.client.shapes import Shape

MOONCAKE_BLOCK_TOKENS = 512
DEFAULT_NUM_FIXED = 64


def read_workload(name: str, limit: int | None = None) -> list[Shape]:
    """Return the first `limit` requests by arrival, the first at 0 s. Raises ValueError for what is no workload."""
    fixed = re.fullmatch(r"fixed:([1-9]\d*)x([1-9]\d*)", name)
    if fixed is not None:
        return [Shape(int(fixed[1]), int(fixed[2]))] * (limit or DEFAULT_NUM_FIXED)
    if name.startswith("fixed:"):
        raise ValueError(f"{name}: a fixed workload is fixed:PROMPTxOUTPUT, both at least 1")
    return read_trace(Path(name), limit)


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
