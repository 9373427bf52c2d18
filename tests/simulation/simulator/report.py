"""What a simulation found, as a value, as JSON and as text.

Means over time are weighted by the device time of the steps; while the device idles, nothing is measured.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from octavo.protocol.engine_messages import EngineStats
from octavo.simulator.measurements import Measurements
from octavo.simulator.settings import Settings


class Percentiles(msgspec.Struct, frozen=True):
    """In seconds; 0 when there is nothing to measure."""

    p50: float
    p90: float
    p99: float


class MemoryShares(msgspec.Struct, frozen=True):
    """Shares of all KV memory, mean over time; they add up to 1.

    Attributes:
        token_states: slots that hold a token.
        reserved: slots that their request is going to fill.
        internal: slots that a request got and does not fill (paged: the rest of its last block).
        external: free, lost between pieces, or lost to the allocator's rounding.
    """

    token_states: float
    reserved: float
    internal: float
    external: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one run.

    Attributes:
        kv_waste: of the slots that requests hold, the share without a token; mean over time.
        kv_waste_mean_of_steps: the same, every step counting alike.
        last_block_share: the part of kv_waste that no paging avoids: half a block, less half a slot, per request.
        device_busy: share of the time in which the device computes.
        prefix_hit_rate: prompt tokens found in the cache / prompt tokens.
        recomputed_share: tokens computed again after a preemption / tokens computed once.
        itl: time between two tokens of a request, over all tokens.
    """

    settings: Settings
    num_requests: int
    num_device_blocks: int
    num_steps: int
    num_output_tokens: int
    makespan_s: float
    output_tokens_per_s: float
    requests_per_s: float
    device_busy: float
    mean_running: float
    max_running: int
    mean_waiting: float
    pool_used: float
    memory: MemoryShares
    kv_waste: float
    kv_waste_mean_of_steps: float
    last_block_share: float
    prefix_hit_rate: float
    num_preemptions: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    swapped_bytes: int
    recomputed_share: float
    ttft: Percentiles
    tpot: Percentiles
    itl: Percentiles


NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0)  # of a run without our scheduler


def make_report(
    settings: Settings, num_device_blocks: int, block_bytes: int, measured: Measurements, stats: EngineStats
) -> Report:
    """Sum a run up. `stats` are the scheduler's counts at its end, NO_STATS for contiguous policies."""
    steps = measured.columns()
    makespan_s = measured.makespan_s
    mean = _mean_over_time(steps)
    allocated, tokens = steps["num_allocated_slots"], steps["num_token_slots"]
    memory = _memory_shares(mean, measured.num_total_slots)
    num_swapped_blocks = stats.num_swapped_out_blocks + stats.num_swapped_in_blocks
    num_useful_tokens = stats.num_scheduled_tokens - stats.num_recomputed_tokens
    half_block = (settings.block_size - 1) / 2
    return Report(
        settings=settings,
        num_requests=measured.num_finished,
        num_device_blocks=num_device_blocks,
        num_steps=len(allocated),
        num_output_tokens=measured.num_output_tokens,
        makespan_s=makespan_s,
        output_tokens_per_s=measured.num_output_tokens / makespan_s,
        requests_per_s=measured.num_finished / makespan_s,
        device_busy=float(steps["duration_s"].sum() / steps["end_s"][-1]),
        mean_running=mean["num_running"],
        max_running=int(steps["num_running"].max()),
        mean_waiting=mean["num_waiting"],
        pool_used=mean["num_allocated_slots"] / measured.num_total_slots,
        memory=memory,
        kv_waste=1 - mean["num_token_slots"] / mean["num_allocated_slots"],
        kv_waste_mean_of_steps=float((1 - tokens / allocated).mean()),
        last_block_share=half_block * mean["num_running"] / mean["num_allocated_slots"],
        prefix_hit_rate=_ratio(stats.num_cached_tokens, stats.num_prompt_tokens),
        num_preemptions=stats.num_preemptions,
        num_swapped_out_blocks=stats.num_swapped_out_blocks,
        num_swapped_in_blocks=stats.num_swapped_in_blocks,
        swapped_bytes=num_swapped_blocks * block_bytes,
        recomputed_share=_ratio(stats.num_recomputed_tokens, num_useful_tokens),
        ttft=_percentiles(measured.ttft_s),
        tpot=_percentiles(measured.tpot_s),
        itl=_percentiles(measured.itl_s),
    )


def _mean_over_time(steps: dict[str, np.ndarray]) -> dict[str, float]:
    weights = steps["duration_s"]
    return {name: float(np.average(column, weights=weights)) for name, column in steps.items()}


def _memory_shares(mean: dict[str, float], num_total_slots: int) -> MemoryShares:
    tokens, reserved, internal = (
        mean[f"num_{kind}_slots"] / num_total_slots for kind in ("token", "reserved", "internal")
    )
    return MemoryShares(tokens, reserved, internal, 1 - tokens - reserved - internal)


def _percentiles(seconds: array[float]) -> Percentiles:
    if not seconds:
        return Percentiles(0.0, 0.0, 0.0)
    return Percentiles(*(float(value) for value in np.percentile(np.frombuffer(seconds), (50, 90, 99))))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def as_json(reports: Sequence[Report]) -> bytes:
    """The reports as a JSON list."""
    return msgspec.json.format(msgspec.json.encode(reports), indent=2)


def from_json(text: bytes) -> list[Report]:
    """What `as_json` wrote."""
    return msgspec.json.decode(text, type=list[Report])


def _seconds(percentiles: Percentiles) -> str:
    return " / ".join(f"{value:.3g}" for value in (percentiles.p50, percentiles.p90, percentiles.p99))


def _rows(report: Report) -> dict[str, str]:
    memory = report.memory
    return {
        "requests": f"{report.num_requests:,}",
        "steps": f"{report.num_steps:,}",
        "makespan s": f"{report.makespan_s:,.1f}",
        "output tokens/s": f"{report.output_tokens_per_s:,.1f}",
        "requests/s": f"{report.requests_per_s:.3f}",
        "device busy": f"{report.device_busy:.1%}",
        "KV blocks": f"{report.num_device_blocks:,}",
        "running, mean / max": f"{report.mean_running:.1f} / {report.max_running}",
        "waiting, mean": f"{report.mean_waiting:.1f}",
        "pool allocated": f"{report.pool_used:.1%}",
        "  token states": f"{memory.token_states:.1%}",
        "  reserved": f"{memory.reserved:.1%}",
        "  internal": f"{memory.internal:.1%}",
        "  external and free": f"{memory.external:.1%}",
        "KV waste, over time": f"{report.kv_waste:.2%}",
        "KV waste, mean of steps": f"{report.kv_waste_mean_of_steps:.2%}",
        "  half of last blocks": f"{report.last_block_share:.2%}",
        "prefix hit rate": f"{report.prefix_hit_rate:.1%}",
        "preemptions": f"{report.num_preemptions:,}",
        "blocks swapped out / in": f"{report.num_swapped_out_blocks:,} / {report.num_swapped_in_blocks:,}",
        "swapped GB": f"{report.swapped_bytes / 1e9:.2f}",
        "recomputed / useful": f"{report.recomputed_share:.2%}",
        "TTFT s, p50 / 90 / 99": _seconds(report.ttft),
        "TPOT s, p50 / 90 / 99": _seconds(report.tpot),
        "ITL s, p50 / 90 / 99": _seconds(report.itl),
    }


def as_text(title: str, names: Sequence[str], reports: Sequence[Report]) -> str:
    """A table with a column per run; `title` says what the runs differ in."""
    columns = [_rows(report) for report in reports]
    lines = [[title, *names], *([label, *(column[label] for column in columns)] for label in columns[0])]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    )
