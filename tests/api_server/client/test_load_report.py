"""Numbers from outcomes: percentiles, rates, what counts, and the tables."""

from __future__ import annotations

import random

import numpy
import pytest

from octavo.api_server.client import load_report
from octavo.api_server.client.load_client import Outcome


@pytest.mark.parametrize("count", [1, 2, 3, 64, 101])
@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_numpys(count: int, percent: float) -> None:
    values = [random.Random(count).expovariate(1) for _ in range(count)]
    random.Random(1).shuffle(values)
    assert load_report.percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_percentiles_of_nothing_are_none() -> None:
    assert load_report.percentile([], 50) is None
    assert load_report.summarize([], 1.0)["ttft_p50_ms"] is None


def good_outcome(num_tokens: int, ttft_s: float, end_to_end_s: float) -> Outcome:
    return Outcome(num_tokens, 10, num_tokens, "x", "length", ttft_s, end_to_end_s, [0.1, 0.3])


def test_only_good_outcomes_count() -> None:
    failed = Outcome(7, error="BadAnswerError: gone", ttft_s=9.0, num_output_tokens=3)
    short = Outcome(7, wrong_length="asked for 7", ttft_s=9.0, num_output_tokens=3)
    found = load_report.summarize([short, good_outcome(5, 0.2, 1.0), failed, good_outcome(3, 0.4, 0.6)], 2.0)
    counts = ("requests", "errors", "wrong_lengths", "output_tokens", "output_tokens_asked", "prompt_tokens")
    assert [found[name] for name in counts] == [4, 1, 1, 8, 22, 20]
    assert found["first_error"] == "asked for 7"
    assert (found["output_tok_s"], found["prompt_tok_s"]) == (4.0, 10.0)
    assert (found["ttft_p50_ms"], found["tpot_p50_ms"], found["itl_p50_ms"]) == (300.0, 150.0, 200.0)
    assert not load_report.is_clean(found)


def test_one_token_has_no_time_per_output_token() -> None:
    assert good_outcome(1, 0.2, 0.2).tpot_s is None
    assert Outcome(5, num_output_tokens=5).tpot_s is None


def test_tables_show_counts_latencies_and_the_kinds_of_errors() -> None:
    outcomes = [good_outcome(5, 0.2, 1.0), Outcome(5, error="HTTP 429: busy"), Outcome(5, error="HTTP 429: full")]
    found = load_report.summarize(outcomes, 2.0)
    assert found["errors_by_kind"] == {"HTTP 429": 2}
    counts, latencies, *rest = load_report.tables(found).split("\n\n")
    assert counts.splitlines()[2] == "| 3 | 2 | 0 | 2 | 0.5 | 5 | 2.5 | 7.5 |"
    assert latencies.splitlines()[2:] == [
        "| TTFT | 200 | 200 | 200 |",
        "| TPOT | 200 | 200 | 200 |",
        "| ITL | 200 | 280 | 298 |",
        "| end to end | 1,000 | 1,000 | 1,000 |",
    ]
    assert rest == ["2 × HTTP 429", "first fault: HTTP 429: busy"]


def test_without_a_good_answer_there_are_no_figures() -> None:
    tables = load_report.tables(load_report.summarize([Outcome(5, error="TimeoutError: ")], 2.0))
    assert "| TTFT | - | - | - |" in tables
