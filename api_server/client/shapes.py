"""Shapes of requests, which have no text: how long, when, which opening they share; and some that are made up.

Made-up shapes never depend on a seed: two runs with other seeds send other text, so no prefix of one is cached for the
other, but ask for equal work at equal times. Lengths are in tokens of the server's model.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

SHARED_PREFIX_TOKENS = 1000


@dataclass(frozen=True, slots=True)
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
    rng = random.Random("lengths")  # noqa: S311 - no secret
    return [Shape(_log_normal(rng, 220, 16, 1024), _log_normal(rng, 120, 8, 400)) for _ in range(count)]


def shared_prefix(count: int) -> list[Shape]:
    """One system prompt of 1,000 tokens, questions of 30, answers of 64."""
    return [Shape(SHARED_PREFIX_TOKENS + 30, 64, 0.0, (0,), SHARED_PREFIX_TOKENS)] * count


def fixed(count: int, num_prompt_tokens: int, num_output_tokens: int) -> list[Shape]:
    """Return `count` requests of the same lengths."""
    return [Shape(num_prompt_tokens, num_output_tokens)] * count


def poisson_arrivals_s(count: int, rate_per_s: float) -> list[float]:
    """Return arrival times from 0 on, with exponential gaps of 1 / `rate_per_s` seconds on average."""
    rng = random.Random("arrivals")  # noqa: S311
    gaps_s = [0.0] + [rng.expovariate(rate_per_s) for _ in range(count - 1)]
    return list(itertools.accumulate(gaps_s))


def at_poisson_arrivals(shapes: list[Shape], rate_per_s: float) -> list[Shape]:
    """Give the shapes such arrival times, whatever arrivals they had."""
    arrivals_s = poisson_arrivals_s(len(shapes), rate_per_s)
    return [replace(shape, arrival_s=arrival_s) for shape, arrival_s in zip(shapes, arrivals_s, strict=True)]
