"""Numbers from outcomes: percentiles, rates, what counts, and what a stalled probe stands for."""

from __future__ import annotations

import random

import health_probe
import numpy
import pytest
import report
from load_client import Outcome
from server_watch import probe_health


@pytest.mark.parametrize("count", [1, 2, 3, 64, 101])
@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_numpys(count: int, percent: float) -> None:
    values = [random.Random(count).expovariate(1) for _ in range(count)]
    random.Random(1).shuffle(values)
    assert report.percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_percentiles_of_nothing_are_none() -> None:
    assert report.percentile([], 50) is None
    assert report.summarize([], 1.0)["ttft_p50_ms"] is None


def good_outcome(num_tokens: int, ttft_s: float, end_to_end_s: float) -> Outcome:
    return Outcome(num_tokens, 10, num_tokens, "x", "length", ttft_s, end_to_end_s, [0.1, 0.3])


def test_only_good_outcomes_count() -> None:
    failed = Outcome(7, error="BadAnswerError: gone", ttft_s=9.0, num_output_tokens=3)
    short = Outcome(7, wrong_length="asked for 7", ttft_s=9.0, num_output_tokens=3)
    found = report.summarize([short, good_outcome(5, 0.2, 1.0), failed, good_outcome(3, 0.4, 0.6)], 2.0)
    counts = ("requests", "errors", "wrong_lengths", "output_tokens", "output_tokens_asked", "prompt_tokens")
    assert [found[name] for name in counts] == [4, 1, 1, 8, 22, 20]
    assert found["first_error"] == "asked for 7"
    assert (found["output_tok_s"], found["prompt_tok_s"]) == (4.0, 10.0)
    assert (found["ttft_p50_ms"], found["tpot_p50_ms"], found["itl_p50_ms"]) == (300.0, 150.0, 200.0)
    assert not report.is_clean(found)


def test_one_token_has_no_time_per_output_token() -> None:
    assert good_outcome(1, 0.2, 0.2).tpot_s is None
    assert Outcome(5, num_output_tokens=5).tpot_s is None


def test_a_row_fits_the_header() -> None:
    found = {"label": "A", "workload": "mixed", "load": "C=8", **report.summarize([good_outcome(5, 0.2, 1.0)], 2.0)}
    head, rule = report.header().splitlines()
    assert head.count("|") == rule.count("|") == report.row(found).count("|")
    assert report.row(found).startswith("| A | mixed | C=8 | 1 | 0 | 0 | 5 | 2.5 | 200 / 200 / 200 |")


def test_servers_are_compared_by_medians() -> None:
    runs = [
        [{"label": label, "output_tok_s": rate, "ttft_p50_ms": None} for rate in rates]
        for label, rates in (("A", (100.0, 900.0, 110.0)), ("B", (220.0, 10.0, 230.0)))
    ]
    comparison = report.compare_servers(runs)
    assert comparison["output_tok_s"]["medians"] == [110.0, 220.0]
    assert comparison["output_tok_s"]["ratios"] == [2.0]
    assert "ttft_p50_ms" not in comparison
    assert "| output_tok_s | 110 (100 to 900) | 220 (10 to 230) | 2.0 |" in report.comparison_table(comparison)


def test_a_stalled_probe_stands_for_those_that_were_due() -> None:
    assert health_probe.with_the_unsent(0.01, 0.02) == [0.01]
    assert health_probe.with_the_unsent(0.05, 0.02) == pytest.approx([0.05, 0.03, 0.01])


async def test_a_probe_that_fails_is_an_error_and_has_no_latency() -> None:
    async with probe_health("http://127.0.0.1:1/health") as health:
        pass
    assert health is not None
    assert health.errors == len(health.late_s) > 0
    assert health.latencies_s == []
    found = report.describe_health(health)
    assert "ConnectionRefused" in found["health_first_error"]
    assert found["health_p99_ms"] is None
    assert not report.is_clean(found)
