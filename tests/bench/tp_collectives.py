"""Time of an all-reduce between CPU workers: `python tests/bench/tp_collectives.py --ranks 2`.

Starts the ranks as processes of their own and prints, for each transport and size, the median and the 95th percentile
in µs of many collectives one after the other, as seen by rank 0. Each rank has one thread and does nothing else.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from rank_processes import group_config

from octavo.worker import distributed_setup
from octavo.worker.distributed import TensorParallelGroup, make_group

TRANSPORTS = ("shared memory", "gloo")
HIDDEN_SIZE = 576
NUMS_ROWS = (1, 8, 32, 64, 512)
DTYPES = (torch.float32, torch.bfloat16)
NUM_RUNS = 1000
NUM_WARM_UP_RUNS = 50


def times_us(group: TensorParallelGroup, x: torch.Tensor) -> tuple[float, float]:
    """Return median and 95th percentile of an all-reduce of `x`."""
    times_s = []
    for _ in range(NUM_WARM_UP_RUNS + NUM_RUNS):
        started_s = time.perf_counter()
        group.all_reduce(x)
        times_s.append(time.perf_counter() - started_s)
        x.zero_()
    ordered = sorted(times_s[NUM_WARM_UP_RUNS:])
    return ordered[NUM_RUNS // 2] * 1e6, ordered[NUM_RUNS * 95 // 100] * 1e6


def run_rank(rank: int, size: int, transport: str, directory: str) -> None:
    torch.set_num_threads(1)
    if transport == "gloo":
        distributed_setup.has_shared_memory = lambda: False
    group = make_group(group_config(directory, size), rank, torch.device("cpu"))
    for dtype in DTYPES:
        for num_rows in NUMS_ROWS:
            median_us, high_us = times_us(group, torch.zeros(num_rows, HIDDEN_SIZE, dtype=dtype))
            if rank == 0:
                name = str(dtype).removeprefix("torch.")
                print(
                    f"{transport:<14} {name:<9} [{num_rows:>3}, {HIDDEN_SIZE}] {median_us:9.1f} {high_us:9.1f}",
                    flush=True,
                )
    group.barrier(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, help="run as this rank, for the script itself")
    parser.add_argument("--transport", choices=TRANSPORTS)
    parser.add_argument("--directory")
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.ranks, options.transport, options.directory)
        return
    print(f"{'transport':<14} {'dtype':<9} {'shape':<10} {'median µs':>9} {'95 % µs':>9}")
    for transport in TRANSPORTS:
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, __file__, "--ranks", str(options.ranks), "--transport", transport]
            ranks = [
                subprocess.Popen([*command, "--directory", directory, "--rank", str(rank)])
                for rank in range(options.ranks)
            ]
            for process in ranks:
                process.wait()


if __name__ == "__main__":
    main()
