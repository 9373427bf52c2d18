"""Runs of several servers to tables: medians of each server, and what Octavo's are to those of each peer.

A ratio is always Octavo's figure ÷ the peer's: above 1 is better for throughput, below 1 for latency, memory and
start. Where a peer was run in several formats, Octavo is also compared with the one that gave most tokens a second.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peer_servers import OCTAVO, Server

from octavo.api_server.client.load_report import Report

MUCH_OTHER_WORK = 0.05
RATIOS = {
    "tok/s": "output_tok_s",
    "TTFT p50": "ttft_p50_ms",
    "TTFT p99": "ttft_p99_ms",
    "TPOT p50": "tpot_p50_ms",
    "TPOT p99": "tpot_p99_ms",
    "PSS": "peak_pss_mib",
    "cold start": "cold_start_s",
}


@dataclass(frozen=True)
class Run:
    """A workload on a server, once."""

    server: Server
    workload: str
    report: Report


class Results:
    """All runs so far, in the order in which they were made."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self.servers = list(dict.fromkeys(run.server.label for run in runs))
        self.workloads = list(dict.fromkeys(run.workload for run in runs))
        self._families = {run.server.label: run.server.family for run in runs}
        self._notes = {run.server.label: run.server.note for run in runs}

    def tables(self) -> str:
        """Return everything as Markdown."""
        return "\n\n".join([self._figures(), self._resources(), self._ratios(), *self._doubts()])

    def median(self, label: str, name: str, workload: str | None = None) -> float | None:
        """Return the median of a figure over a server's rounds, of one workload or of all (None: not measured)."""
        values = [run.report[name] for run in self._of(label, workload) if run.report.get(name) is not None]
        return statistics.median(values) if values else None

    def rivals(self, workload: str) -> list[tuple[str, str]]:
        """Return (name, server) of all that Octavo is compared with, the best format of each peer included."""
        peers = [label for label in self.servers if self._families[label] != OCTAVO and self._of(label, workload)]
        found = [(label, label) for label in peers]
        for family in dict.fromkeys(self._families[label] for label in peers):
            formats = [label for label in peers if self._families[label] == family]
            if len(formats) > 1:
                best = max(formats, key=lambda label: self.median(label, "output_tok_s", workload) or 0.0)
                found.append((f"best of {family}: {best.removeprefix(f'{family}-')}", best))
        return found

    def _of(self, label: str, workload: str | None) -> list[Run]:
        return [run for run in self._runs if run.server.label == label and workload in (None, run.workload)]

    def _figures(self) -> str:
        rows = [
            [
                workload,
                label,
                self._spread(label, workload),
                self._pair("ttft", label, workload),
                self._pair("tpot", label, workload),
                text(self.median(label, "peak_pss_mib", workload)),
                str(sum(run.report["errors"] + run.report["wrong_lengths"] for run in self._of(label, workload))),
                percent(self.median(label, "other_work", workload)),
            ]
            for workload in self.workloads
            for label in self.servers
            if self._of(label, workload)
        ]
        head = ("workload", "server", "output tok/s (range)", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "peak PSS MiB",
                "faults", "other work")  # fmt: skip
        return table(head, rows)

    def _resources(self) -> str:
        rows = [
            [
                label,
                text(self.median(label, "cold_start_s")),
                text(self.median(label, "start_pss_mib")),
                percent(self.median(label, "idle_cpu")),
                self._notes[label],
            ]
            for label in self.servers
        ]
        head = ("server", "command to first token s", "PSS then MiB", "CPU at rest (of one core)", "how it was run")
        return table(head, rows)

    def _ratios(self) -> str:
        ours = [label for label in self.servers if self._families[label] == OCTAVO]
        rows = [
            [workload, label, name, *(self._ratio(label, rival, figure, workload) for figure in RATIOS.values())]
            for workload in self.workloads
            for label in ours
            for name, rival in self.rivals(workload)
        ]
        return table(("workload", "Octavo", "÷ peer", *RATIOS), rows)

    def _doubts(self) -> list[str]:
        return [
            f"Doubtful: {percent(work)} of the machine did other work during {run.workload} of {run.server.label}."
            for run in self._runs
            if (work := run.report["other_work"]) > MUCH_OTHER_WORK
        ]

    def _ratio(self, label: str, rival: str, figure: str, workload: str) -> str:
        our, their = self.median(label, figure, workload), self.median(rival, figure, workload)
        return "-" if our is None or not their else f"{our / their:.2f}"

    def _spread(self, label: str, workload: str) -> str:
        values = [run.report["output_tok_s"] for run in self._of(label, workload)]
        median = text(statistics.median(values))
        return median if len(values) == 1 else f"{median} ({text(min(values))} to {text(max(values))})"

    def _pair(self, name: str, label: str, workload: str) -> str:
        return " / ".join(text(self.median(label, f"{name}_p{number}_ms", workload)) for number in (50, 99))


def text(value: float | None) -> str:
    """Return a figure with three digits or more."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(fraction: float | None) -> str:
    """Return a fraction as percent."""
    return "-" if fraction is None else f"{fraction * 100:.1f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)])
