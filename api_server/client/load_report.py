"""Outcomes to numbers: one flat dictionary a run, and its tables.

Only good outcomes count, in rates and in percentiles: whole, and of the length that was asked. Percentiles are
interpolated linearly, as by most tools, so that figures compare. ITL is the gap between chunks that hold text, TPOT
the time after the first token over the number of tokens after it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.api_server.client.load_client import Outcome

PERCENTS = (50, 90, 99)
COUNTS = {"requests": "requests", "errors": "errors", "wrong length": "wrong_lengths", "seconds": "seconds",
          "requests/s": "requests_s", "prompt tok/s": "prompt_tok_s", "output tok/s": "output_tok_s",
          "total tok/s": "total_tok_s"}  # fmt: skip
LATENCIES = {"TTFT": "ttft", "TPOT": "tpot", "ITL": "itl", "end to end": "end_to_end"}

Report = dict[str, Any]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the value below which `percent` of `values` lie, interpolated between neighbours (None: no values)."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentiles_ms(name: str, values_s: Iterable[float | None]) -> Report:
    """Return p50, p90 and p99 of `values_s` as `NAME_p50_ms` …; None has no part in them."""
    known_s = [value for value in values_s if value is not None]
    found = {percent: percentile(known_s, percent) for percent in PERCENTS}
    return {f"{name}_p{percent}_ms": None if s is None else round(s * 1000, 2) for percent, s in found.items()}


def summarize(outcomes: Sequence[Outcome], seconds: float) -> Report:
    """Return counts, rates over `seconds`, and percentiles of one run."""
    good = [outcome for outcome in outcomes if outcome.is_good]
    num_prompt_tokens = sum(outcome.num_prompt_tokens for outcome in good)
    num_output_tokens = sum(outcome.num_output_tokens for outcome in good)
    problems = [problem for outcome in outcomes if (problem := outcome.error or outcome.wrong_length)]
    return {
        "requests": len(outcomes),
        "errors": sum(outcome.error is not None for outcome in outcomes),
        "wrong_lengths": sum(outcome.wrong_length is not None for outcome in outcomes),
        "first_error": next(iter(problems), None),
        "errors_by_kind": Counter(outcome.error_kind for outcome in outcomes if outcome.error_kind),
        "seconds": round(seconds, 6),
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "output_tokens_asked": sum(outcome.num_asked_tokens for outcome in outcomes),
        "prompt_tok_s": round(num_prompt_tokens / seconds, 1),
        "output_tok_s": round(num_output_tokens / seconds, 1),
        "total_tok_s": round((num_prompt_tokens + num_output_tokens) / seconds, 1),
        "requests_s": round(len(good) / seconds, 3),
        **percentiles_ms("ttft", (outcome.ttft_s for outcome in good)),
        **percentiles_ms("tpot", (outcome.tpot_s for outcome in good)),
        **percentiles_ms("itl", itertools.chain.from_iterable(outcome.chunk_gaps_s for outcome in good)),
        **percentiles_ms("end_to_end", (outcome.end_to_end_s for outcome in good)),
    }


def is_clean(report: Report) -> bool:
    """Return whether every request was answered as asked."""
    return not (report["errors"] or report["wrong_lengths"])


def number(value: float | None) -> str:
    """Return a figure as tables show it: three digits, or all before the point."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(report: Report) -> str:
    """Return a run as tables: counts and rates, latencies, and how many requests failed in which way."""
    counts = table([*COUNTS], [[number(report[name]) for name in COUNTS.values()]])
    percents = [f"p{percent}" for percent in PERCENTS]
    latencies = table(
        ["ms", *percents],
        [
            [title, *(number(report[f"{name}_{percent}_ms"]) for percent in percents)]
            for title, name in LATENCIES.items()
        ],
    )
    kinds = [f"{count} × {kind}" for kind, count in report["errors_by_kind"].items()]
    problems = [f"first fault: {report['first_error']}"] if report["first_error"] else []
    return "\n\n".join([counts, latencies, *kinds, *problems])
