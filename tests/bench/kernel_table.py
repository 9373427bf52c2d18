"""The table of kernels: times of works beside their bounds and beside torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import kernel_works as works
from kernel_works import Shapes, Work
from machine_peaks import Peaks

from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.ops.packed_linear import WeightFormat

FORMATS = (WeightFormat.BFLOAT16, WeightFormat.Q8_0, WeightFormat.Q4_0, WeightFormat.Q4_1)
ALL_ROWS = (1, 8, 32, 256, 512)
HEAD_ROWS = (1, 8, 32)
PARTS = ("linear", "logits", "attention", "small", "sampling")
REST_S = 0.003  # torch's threads spin for a while after their work


def _time_s(run: Callable[[], object], num_runs: int) -> float:
    started_s = time.perf_counter()
    for _ in range(num_runs):
        run()
    return (time.perf_counter() - started_s) / num_runs


def _num_runs(run: Callable[[], object], repeat_s: float) -> int:
    run()
    return max(1, min(1000, int(repeat_s / _time_s(run, 1))))


def _recorded(work: Work) -> Callable[[], object]:
    """The work without Python between its kernels, where it can be recorded."""
    if work.num_rows is None:
        return work.run
    with EXECUTOR.record(work.num_rows) as commands:
        work.run()
    return lambda: commands.replay(work.num_rows)


class Bench:
    """Times works and prints the table."""

    def __init__(self, peaks: Peaks, num_repeats: int, repeat_s: float) -> None:
        self.peaks = peaks
        self.num_repeats = num_repeats
        self.repeat_s = repeat_s

    def bound_s(self, work: Work) -> float:
        operations_per_s = getattr(self.peaks, f"{work.operation_type}_per_s")
        return max(work.num_bytes / self.peaks.bytes_per_s, work.num_operations / operations_per_s)

    def times_s(self, work: Work) -> tuple[float, float]:
        """Medians for one instance of the kernel, ours and torch's."""
        pairs = []
        run = _recorded(work)
        nums = _num_runs(run, self.repeat_s), _num_runs(work.run_torch, self.repeat_s)
        num_torch = len(done) if isinstance(done := work.run_torch(), list) else 1
        for _ in range(self.num_repeats):
            time.sleep(REST_S)
            own_s = _time_s(run, nums[0])
            pairs.append((own_s / work.num_instances, _time_s(work.run_torch, nums[1]) / num_torch))
        own, by_torch = zip(*pairs, strict=True)
        return statistics.median(own), statistics.median(by_torch)

    def report(self, all_works: Iterable[Work]) -> None:
        for work in all_works:
            own_s, torch_s = self.times_s(work)
            bound_s = self.bound_s(work)
            numbers = f"{own_s * 1e6:10.1f} {bound_s * 1e6:9.1f} {bound_s / own_s:9.0%} {torch_s * 1e6:11.1f}"
            print(f"{work.name:<46} {numbers} {torch_s / own_s:7.1f} ×", flush=True)


def make_works(shapes: Shapes, part: str, formats: list[WeightFormat]) -> Iterator[Work]:
    if part == "linear":
        for weight_format in formats:
            yield from works.linear_works(shapes, weight_format, ALL_ROWS)
    elif part == "logits":
        for weight_format in formats:
            yield from works.head_works(shapes, weight_format, HEAD_ROWS)
    elif part == "attention":
        yield from works.attention_works(shapes)
    elif part == "small":
        yield from works.small_works(shapes, ALL_ROWS)
    else:
        yield from works.sampling_works(shapes)
