"""Predicts how long kernels take on GPUs that are not here: `python tests/bench/roofline.py`.

A prediction is made from the shapes (bytes and operations per launch) and from the kernels as they are compiled for the
target: registers and shared memory give the blocks that a multiprocessor holds, the loads that a block has under way
give its share of the bandwidth. It is a model of limits, with these terms:

- Memory: the programs that run at once are served at the least of the bandwidth that the memory sustains (SUSTAINED of
  its peak), their bytes under way over its latency under load (Little's law), and the bandwidth of the multiprocessors
  that they occupy. The last programs of a launch run at the rate that so few get.
- Arithmetic: a multiprocessor works at its peak; a wave takes as long as the multiprocessor with the most blocks.
  Softmax is not done by tensor cores: both figures are given, all of it hidden behind the products and none of it.
- Before a launch: LAUNCH_S from one kernel of a graph to the next, and a latency of the idle memory for each load that
  its first large load waits for.

Shares count what an op must move. Partial results, which a split costs, take time but are not counted. Beside the share
of the peak stands, in brackets, that of what the memory sustains: no kernel gets more.

What it leaves out: the L2 cache (all bytes come from memory once), bank conflicts, waiting at barriers, masked parts of
tiles, clocks below the boost clock. So a real figure above it is a defect of the model, and one far below a defect of
the kernel. Rejected: shares of peak from bytes and operations alone, which call every kernel perfect.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

SUSTAINED = 0.92  # of the peak bandwidth: STREAM triad on an H100 gives 3.08 of 3.35 TB/s
LATENCY_S = 1.0e-6  # of device memory under load
IDLE_LATENCY_S = 0.6e-6
LAUNCH_S = 1.5e-6
MULTIPROCESSOR_BYTES_PER_CLOCK = 64  # between a multiprocessor and the L2 cache
LOAD_BYTES = 16
EXPONENTIALS_PER_CLOCK = 16
VECTOR_OPERATIONS_PER_SCORE = 7  # maximum, difference, sum, conversion, and the accumulator's scaling


@dataclass(frozen=True)
class Gpu:
    """A device, from its vendor's data sheet."""

    name: str
    target: str
    num_multiprocessors: int
    clock_hz: float
    peak_bytes_per_s: float
    peak_flops: float
    vector_lanes: int


GPUS = (
    Gpu("A100 80G SXM", "sm_80", 108, 1.41e9, 2.039e12, 312e12, 64),
    Gpu("H100 SXM", "sm_90", 132, 1.83e9, 3.35e12, 989e12, 128),
    Gpu("H200", "sm_90", 132, 1.83e9, 4.8e12, 989e12, 128),
)


@dataclass(frozen=True, kw_only=True)
class Amount:
    """What one launch must do.

    Attributes:
        num_bytes: that the op must read and write.
        extra_bytes: that the kernels pass to each other.
        flops: of tensor cores.
        num_scores: that go through a softmax.
        num_dependent_loads: before its first large load can be made.
    """

    num_bytes: int
    flops: int = 0
    num_scores: int = 0
    num_dependent_loads: int = 1
    extra_bytes: int = 0


@dataclass(frozen=True)
class Launch(Amount):
    """One compiled launch and its part of the op's work."""

    kernel: str
    num_programs: int
    resources: dict[str, Any]
    resident_blocks: int


@dataclass(frozen=True)
class Prediction:
    """Of one op: time with vector work hidden behind tensor cores, and with none of it hidden."""

    hidden_s: float
    serial_s: float
    under_way_bytes: int
    needed_bytes: float
    num_waves: float
    limits: set[str] = field(default_factory=set)


def under_way_bytes(launch: Launch) -> int:
    """Bytes that one block has asked for and not yet received.

    A pipelined loop has all but one of its buffers under way, and its buffers are most of its shared memory. Other
    kernels wait for a value when they use it: what they load before that is under way, at most all that there is.
    """
    resources = launch.resources
    instructions_bytes = resources["num_wide_loads"] * LOAD_BYTES * 32 * resources["num_warps"]
    if resources["num_async_copies"]:
        stages = resources["num_stages"]
        return min(instructions_bytes, resources["shared_bytes"]) * (stages - 1) // stages
    return min(instructions_bytes, (launch.num_bytes + launch.extra_bytes) // launch.num_programs)


def predict_launch(launch: Launch, gpu: Gpu) -> Prediction:
    num_slots = launch.resident_blocks * gpu.num_multiprocessors
    program_bytes = (launch.num_bytes + launch.extra_bytes) / launch.num_programs
    program_under_way = max(1, under_way_bytes(launch))
    per_multiprocessor = gpu.peak_flops / gpu.num_multiprocessors
    clock_s = 1 / gpu.clock_hz
    tensor_s = launch.flops / launch.num_programs / per_multiprocessor
    score_clocks = VECTOR_OPERATIONS_PER_SCORE / gpu.vector_lanes + 1 / EXPONENTIALS_PER_CLOCK
    vector_s = launch.num_scores / launch.num_programs * score_clocks * clock_s

    start_s = LAUNCH_S + launch.num_dependent_loads * IDLE_LATENCY_S
    hidden_s = serial_s = start_s
    limits: set[str] = set()
    remaining = launch.num_programs
    while remaining:
        running = min(remaining, num_slots)
        rates = {
            "bandwidth": SUSTAINED * gpu.peak_bytes_per_s,
            "latency": running * program_under_way / LATENCY_S,
            "few programs": min(running, gpu.num_multiprocessors) * MULTIPROCESSOR_BYTES_PER_CLOCK * gpu.clock_hz,
        }
        limit = min(rates, key=rates.__getitem__)
        memory_s = running * program_bytes / rates[limit]
        per_block = -(-running // gpu.num_multiprocessors)
        arithmetic_s = per_block * max(tensor_s, vector_s), per_block * (tensor_s + vector_s)
        limits.add(limit if memory_s > arithmetic_s[0] else "tensor cores" if tensor_s > vector_s else "softmax")
        hidden_s += max(memory_s, arithmetic_s[0])
        serial_s += max(memory_s, arithmetic_s[1])
        remaining -= running
    needed_bytes = SUSTAINED * gpu.peak_bytes_per_s * LATENCY_S / gpu.num_multiprocessors
    resident = min(launch.resident_blocks, -(-launch.num_programs // gpu.num_multiprocessors))
    waves = launch.num_programs / num_slots
    return Prediction(hidden_s, serial_s, program_under_way * resident, needed_bytes, waves, limits)


@dataclass(frozen=True)
class Work:
    """One op on one shape, with its launches for one target."""

    name: str
    launches: list[Launch]


@dataclass(frozen=True)
class Share:
    """What an op reaches of some limit, in percent: with vector work hidden behind tensor cores, and with none."""

    best: float
    worst: float

    def __str__(self) -> str:
        return f"{self.best:.0f}" if self.best - self.worst < 1 else f"{self.worst:.0f}–{self.best:.0f}"


@dataclass(frozen=True)
class Forecast:
    """Of one op on one GPU."""

    work: Work
    gpu: Gpu

    @cached_property
    def predictions(self) -> list[Prediction]:
        return [predict_launch(launch, self.gpu) for launch in self.work.launches]

    @property
    def main(self) -> tuple[Launch, Prediction]:
        """The launch that takes the longest."""
        return max(zip(self.work.launches, self.predictions, strict=True), key=lambda pair: pair[1].serial_s)

    @property
    def hidden_s(self) -> float:
        return sum(prediction.hidden_s for prediction in self.predictions)

    @property
    def serial_s(self) -> float:
        return sum(prediction.serial_s for prediction in self.predictions)

    def share(self, amount: float, peak_per_s: float) -> Share:
        return Share(100 * amount / peak_per_s / self.hidden_s, 100 * amount / peak_per_s / self.serial_s)

    @property
    def num_bytes(self) -> int:
        return sum(launch.num_bytes for launch in self.work.launches)

    @property
    def flops(self) -> int:
        return sum(launch.flops for launch in self.work.launches)

    @property
    def sustained_share(self) -> Share:
        return self.share(self.num_bytes, SUSTAINED * self.gpu.peak_bytes_per_s)

    def __str__(self) -> str:
        """A row of the table."""
        launch, main = self.main
        is_range = self.serial_s > 1.01 * self.hidden_s
        time_us = f"{self.hidden_s * 1e6:.1f}" + (f"–{self.serial_s * 1e6:.1f}" if is_range else "")
        peak_share = self.share(self.num_bytes, self.gpu.peak_bytes_per_s)
        flop_share = self.share(self.flops, self.gpu.peak_flops) if self.flops else "–"
        cells = (
            *(self.work.name, self.gpu.name, f"{self.num_bytes / 1e6:.1f}", f"{self.flops / 1e9:.1f}"),
            *(f"{launch.resident_blocks} × {self.gpu.num_multiprocessors}", f"{main.num_waves:.2f}"),
            f"{main.under_way_bytes / 1024:.0f} of {main.needed_bytes / 1024:.0f}",
            *(time_us, f"{peak_share} ({self.sustained_share})", f"{flop_share}", ", ".join(sorted(main.limits))),
        )
        return f"| {' | '.join(cells)} |"


HEADER = (
    "| op | GPU | MB | GFLOP | programs at once | waves | KiB under way, of those needed | µs "
    "| % of peak bandwidth (of sustained) | % of peak FLOP/s | limit |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def works_for(target: str) -> list[Work]:
    """Compile for `target` in a process of its own."""
    command = [sys.executable, Path(__file__).with_name("roofline_works.py"), target]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    works = json.loads(text.splitlines()[-1])
    return [Work(name, [Launch(**launch) for launch in launches]) for name, launches in works]


def forecasts(gpus: Sequence[Gpu] = GPUS) -> list[Forecast]:
    """One for each op and GPU, those of one op side by side."""
    works = {target: works_for(target) for target in {gpu.target: None for gpu in gpus}}
    by_gpu = [[Forecast(work, gpu) for work in works[gpu.target]] for gpu in gpus]
    return [forecast for of_one_op in zip(*by_gpu, strict=True) for forecast in of_one_op]


def table_of(rows: Sequence[Forecast]) -> str:
    """Markdown; a row per op and GPU."""
    note = f"Predicted, not measured; {100 * SUSTAINED:.0f} % of the peak bandwidth is taken to be sustained."
    return "\n".join([note, "", HEADER, *map(str, rows)])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(table_of(forecasts()))


if __name__ == "__main__":
    main()
