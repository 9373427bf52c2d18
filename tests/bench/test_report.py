"""What load.py adds to the figures: rows, servers compared, and what a stalled probe stands for."""

from __future__ import annotations

import health_probe
import pytest
import report
from server_watch import probe_health

from octavo.api_server.client.load_client import Outcome
from octavo.api_server.client.load_report import summarize


def good_outcome(num_tokens: int, ttft_s: float, end_to_end_s: float) -> Outcome:
    return Outcome(num_tokens, 10, num_tokens, "x", "length", ttft_s, end_to_end_s, [0.1, 0.3])


def test_a_row_fits_the_header() -> None:
    found = {"label": "A", "workload": "mixed", "load": "C=8", **summarize([good_outcome(5, 0.2, 1.0)], 2.0)}
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
