"""What load.py adds to a run's figures: the server seen from outside, a row of a table, ratios between servers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from server_watch import HealthProbe, ProcessUsage

from octavo.api_server.client import load_report
from octavo.api_server.client.load_client import Outcome
from octavo.api_server.client.load_report import PERCENTS, Report, percentiles_ms, table

COMPARED = ("output_tok_s", "prompt_tok_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "itl_p99_ms",
            "end_to_end_p50_ms", "end_to_end_p99_ms", "server_cpu_s", "peak_rss_mib", "peak_pss_mib")  # fmt: skip
COLUMNS = ("server", "workload", "load", "requests", "errors", "wrong length", "prompt tok/s", "output tok/s",
           "TTFT ms", "TPOT ms", "ITL ms", "end to end ms", "/health ms", "CPU s", "RSS / PSS MiB")  # fmt: skip


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
        **percentiles_ms("health", health.latencies_s),
        "health_max_ms": round(max(health.latencies_s, default=0.0) * 1000, 2),
        **percentiles_ms("health_late", health.late_s),
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
    others = ("health_errors", "outputs_differing")
    return not any(report.get(name) for name in others) and load_report.is_clean(report)


def header() -> str:
    """Return the head of the table. Triples are p50 / p90 / p99."""
    return table(COLUMNS, [])


def row(report: Report) -> str:
    """Return a run as a line of the table."""

    def number(name: str) -> str:
        return load_report.number(report.get(name))

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
    rows = []
    for name in COMPARED:
        if name in comparison:
            found = comparison[name]
            medians = [
                f"{median:g} ({min(values):g} to {max(values):g})"
                for median, values in zip(found["medians"], found["runs"], strict=True)
            ]
            rows.append([name, *medians, *(str(ratio) for ratio in found["ratios"])])
    return table(head, rows)
