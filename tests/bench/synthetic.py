"""Shapes of made-up requests: how long, when, which opening they share. Traces: `octavo.simulator.traces`.

Shapes never depend on the seed: two runs with other seeds send other text, so no prefix of one is cached for the other,
but ask for equal work at equal times. Lengths are in tokens of the server's model.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from octavo.simulator.traces import Shape

SHARED_PREFIX_TOKENS = 1000


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


def at_poisson_arrivals(shapes: list[Shape], rate_per_s: float) -> list[Shape]:
    """Give the shapes exponential gaps of 1 / `rate_per_s` seconds on average, whatever arrivals they had."""
    rng = random.Random("arrivals")
    gaps_s = [0.0] + [rng.expovariate(rate_per_s) for _ in shapes[1:]]
    return [
        replace(shape, arrival_s=arrival_s)
        for shape, arrival_s in zip(shapes, itertools.accumulate(gaps_s), strict=True)
    ]
