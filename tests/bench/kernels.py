"""Times of the CPU kernels beside what the machine allows, and beside torch: `python tests/bench/kernels.py`.

Each line is the median of several repeats that alternate with torch's. `bound` is the time that the measured bandwidth
needs for the bytes that the kernel cannot avoid to move, or the measured peak for its operations, whichever is longer;
`of bound` is its share of the kernel's time. Memory is measured by reading as many bytes as a model's weights have, so
small results, which stay in caches, may come out above 100 %. Layers' kernels are timed as a recorded list of all
layers, without Python between them; ops behind the forward pass (logits, sampling) as the worker calls them.
Beside blocks of 8 and 4 bits stands torch's product with bfloat16 weights; beside attention the torch reference.
"""

from __future__ import annotations

import argparse
from dataclasses import fields

import torch
from kernel_table import FORMATS, PARTS, Bench, make_works
from kernel_works import Shapes
from machine_peaks import measure_peaks

import octavo.kernels.cpu.backends  # noqa: F401 - registers the kernels
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.ops.packed_linear import WeightFormat
from octavo.kernels.registry import select


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--instruction-set", help="default: the best of this machine")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--formats", nargs="+", type=WeightFormat, choices=FORMATS, default=FORMATS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--repeat-ms", type=float, default=20.0, help="least time of one repeat")
    parser.add_argument("--memory-mb", type=float, default=256.0, help="bytes that the measured reads go over")
    for field in fields(Shapes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    instruction_set = EXECUTOR.start(arguments.threads, arguments.instruction_set)
    select("cpu")
    peaks = measure_peaks(instruction_set, arguments.threads, int(arguments.memory_mb * 1e6))
    print(f"{instruction_set}, {arguments.threads} threads: {peaks.describe()}")
    print(f"{'':<46} {'µs':>10} {'bound':>9} {'of bound':>9} {'torch µs':>11} {'ratio':>7}")
    shapes = Shapes(**{field.name: getattr(arguments, field.name) for field in fields(Shapes)})
    bench = Bench(peaks, arguments.repeats, arguments.repeat_ms / 1e3)
    for part in arguments.parts:
        bench.report(make_works(shapes, part, list(arguments.formats)))


if __name__ == "__main__":
    main()
