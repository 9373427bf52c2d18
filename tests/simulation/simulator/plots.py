"""Pictures of one or several runs, as a PNG. matplotlib is imported only here, and only when a picture is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.simulator.measurements import Measurements
from octavo.simulator.report import Report

NUM_BINS = 400
MEMORY_KINDS = ("token_states", "reserved", "internal", "external")


class MissingMatplotlibError(RuntimeError):
    """matplotlib is not installed."""


def require_matplotlib() -> Any:
    """Return the class of pictures. Raises MissingMatplotlibError, which says what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError as problem:
        raise MissingMatplotlibError("plots need matplotlib: pip install 'octavo[simulate]'") from problem
    return Figure


def write_plot(
    path: Path, title: str, names: Sequence[str], reports: Sequence[Report], measured: Sequence[Measurements]
) -> None:
    """Write a picture with four panels: memory by use, memory over time, requests over time, time to first token."""
    figure = require_matplotlib()(figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    ((memory, pool), (requests, latency)) = figure.subplots(2, 2)
    _bars(memory, names, reports)
    pool.set(title="KV memory that holds tokens", xlabel="s", ylabel="share", ylim=(0, 1))
    requests.set(title="requests: running, and waiting (dashed)", xlabel="s")
    latency.set(title="time to first token", xlabel="s", ylabel="share of requests", xscale="log", ylim=(0, 1))
    for index, (name, run) in enumerate(zip(names, measured, strict=True)):
        color = f"C{index % 10}"
        steps = run.columns()
        pool.plot(*_over_time(steps, steps["num_token_slots"] / run.num_total_slots), color=color, label=name)
        requests.plot(*_over_time(steps, steps["num_running"]), color=color, label=name)
        requests.plot(*_over_time(steps, steps["num_waiting"]), color=color, linestyle="--")
        latency.plot(np.sort(run.ttft_s), np.linspace(0, 1, len(run.ttft_s)), color=color, label=name)
    for axes in (pool, requests, latency):
        axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=110)


def _bars(axes: Any, names: Sequence[str], reports: Sequence[Report]) -> None:
    bottom = np.zeros(len(reports))
    for kind in MEMORY_KINDS:
        shares = np.array([getattr(report.memory, kind) for report in reports])
        axes.bar(range(len(reports)), shares, bottom=bottom, label=kind.replace("_", " "))
        bottom += shares
    axes.set(title="KV memory by use", ylabel="share", ylim=(0, 1))
    axes.set_xticks(range(len(reports)), names)
    axes.legend(fontsize="small")


def _over_time(steps: dict[str, np.ndarray], values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of the values in equal spans of time; spans without a step are left out."""
    times = steps["end_s"]
    bins = np.minimum((times / times[-1] * NUM_BINS).astype(int), NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    with_steps = counts > 0
    means = np.bincount(bins, weights=values, minlength=NUM_BINS)[with_steps] / counts[with_steps]
    return (np.arange(NUM_BINS)[with_steps] + 0.5) / NUM_BINS * times[-1], means
