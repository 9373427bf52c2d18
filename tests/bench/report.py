"""Outcomes to numbers: one flat dictionary a run (the JSON line), a row of a table, and ratios between two servers.

Only good outcomes count, in rates and in percentiles: whole, and of the length that was asked. Percentiles are
interpolated linearly, as by most tools, so that figures compare. ITL is the gap between chunks that hold text, TPOT
the time after the first token over the number of tokens after it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from load_client import Outcome
from server_watch import HealthProbe, ProcessUsage

PERCENTS = (50, 90, 99)
COMPARED = ("output_tok_s", "prompt_tok_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "itl_p99_ms",
            "end_to_end_p50_ms", "end_to_end_p99_ms", "server_cpu_s", "peak_rss_mib", "peak_pss_mib")  # fmt: skip
COLUMNS = ("server", "workload", "load", "requests", "errors", "wrong length", "prompt tok/s", "output tok/s",
           "TTFT ms", "TPOT ms", "ITL ms", "end to end ms", "/health ms", "CPU s", "RSS / PSS MiB")  # fmt: skip

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


def _percentiles_ms(name: str, values_s: Iterable[float | None]) -> Report:
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
        "seconds": round(seconds, 6),
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "output_tokens_asked": sum(outcome.num_asked_tokens for outcome in outcomes),
        "prompt_tok_s": round(num_prompt_tokens / seconds, 1),
        "output_tok_s": round(num_output_tokens / seconds, 1),
        **_percentiles_ms("ttft", (outcome.ttft_s for outcome in good)),
        **_percentiles_ms("tpot", (outcome.tpot_s for outcome in good)),
        **_percentiles_ms("itl", itertools.chain.from_iterable(outcome.chunk_gaps_s for outcome in good)),
        **_percentiles_ms("end_to_end", (outcome.end_to_end_s for outcome in good)),
    }


def describe_processes(usage: ProcessUsage | None) -> Report:
    """Return memory and CPU time of the server (nothing where they were not watched)."""
    if usage is None:
        return {}
    pss_bytes = usage.peak_pss_bytes
    return {
        "server_cpu_s": round(usage.cpu_s, 2),
        "peak_rss_mib": round(usage.peak_rss_bytes / 2**20, 1),
        "peak_pss_mib": None if pss_bytes is None else round(pss_bytes / 2**20, 1),
    }


def describe_health(health: HealthProbe | None) -> Report:
    """Return the latencies of /health (nothing where they were not measured)."""
    if health is None:
        return {}
    return {
        "health_probes": len(health.late_s),
        "health_errors": health.errors,
        "health_first_error": health.first_error,
        **_percentiles_ms("health", health.latencies_s),
        "health_max_ms": round(max(health.latencies_s, default=0.0) * 1000, 2),
        **_percentiles_ms("health_late", health.late_s),
    }


def compare_answers(together: Sequence[Outcome], alone: Sequence[Outcome]) -> Report:
    """Return how many requests were answered otherwise under load than alone; one without an answer counts too."""
    pairs = list(zip(together, alone, strict=True))
    differing = [i for i, (a, b) in enumerate(pairs) if not (a.is_good and b.is_good and a.text == b.text)]
    first = [pairs[index] for index in differing[:1]]
    return {
        "outputs_compared": len(pairs),
        "outputs_differing": len(differing),
        "alone_first_error": next((b.error or b.wrong_length for _, b in pairs if not b.is_good), None),
        "first_difference": [{"together": a.text, "alone": b.text} for a, b in first],
    }


def is_clean(report: Report) -> bool:
    """Return whether every request was answered as asked, and, where that was compared, as it is answered alone."""
    counts = ("errors", "wrong_lengths", "health_errors", "outputs_differing")
    return not any(report.get(name) for name in counts)


def header() -> str:
    """Return the head of the table. Triples are p50 / p90 / p99."""
    return f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def row(report: Report) -> str:
    """Return a run as a line of the table."""

    def number(name: str) -> str:
        value = report.get(name)
        return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    def triple(name: str) -> str:
        return " / ".join(number(f"{name}_p{percent}_ms") for percent in PERCENTS)

    texts = [str(report[name]) for name in ("label", "workload", "load", "requests", "errors", "wrong_lengths")]
    rates = [number("prompt_tok_s"), number("output_tok_s")]
    latencies = [triple(name) for name in ("ttft", "tpot", "itl", "end_to_end", "health")]
    if report.get("health_errors"):
        latencies[-1] += f" ({report['health_errors']} failed)"
    memory = f"{number('peak_rss_mib')} / {number('peak_pss_mib')}"
    return f"| {' | '.join([*texts, *rates, *latencies, number('server_cpu_s'), memory])} |"


def remarks(report: Report) -> list[str]:
    """Return what a row has no room for: the first fault, and whether load changed answers."""
    lines = [f"first fault: {report['first_error']}"] if report["first_error"] else []
    if "outputs_compared" in report:
        counts = f"{report['outputs_differing']} of {report['outputs_compared']}"
        lines.append(f"{counts} answers under load differ from the same requests' answers alone")
    return [f"{report['label']}: {line}" for line in lines]


def compare_servers(runs: Sequence[Sequence[Report]]) -> Report:
    """Return the median of each figure per server (`runs[server][round]`) and its ratio to that of the first server."""
    comparison: Report = {"labels": [reports[0]["label"] for reports in runs]}
    for name in COMPARED:
        values = [[report[name] for report in reports if report.get(name) is not None] for reports in runs]
        if all(values):
            medians = [statistics.median(of_server) for of_server in values]
            ratios = [round(median / medians[0], 3) if medians[0] else None for median in medians[1:]]
            comparison[name] = {"medians": [round(median, 2) for median in medians], "ratios": ratios, "runs": values}
    return comparison


def comparison_table(comparison: Report) -> str:
    """Return the comparison as a table: medians, then ratios to the first server, then the range of each."""
    first, *others = comparison["labels"]
    head = ["median of", first, *others, *(f"{label} : {first}" for label in others)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name in COMPARED:
        if name in comparison:
            found = comparison[name]
            medians = [
                f"{median:g} ({min(values):g} to {max(values):g})"
                for median, values in zip(found["medians"], found["runs"], strict=True)
            ]
            lines.append(f"| {' | '.join([name, *medians, *(str(ratio) for ratio in found['ratios'])])} |")
    return "\n".join(lines)
