"""`python rank_script.py RANK SIZE SCENARIO TRANSPORT DIRECTORY [PORT]`: one rank of a group, as a test's process."""

from __future__ import annotations

import os
import random
import sys
import time
import traceback

import torch
from rank_processes import broadcast_checked, group_config

from octavo.worker import distributed_setup
from octavo.worker.distributed import TensorParallelGroup, make_group
from octavo.worker.distributed_checksum import StepChecksum

CPU = torch.device("cpu")
NUM_COLLECTIVES = 150
NUM_LARGE_ROWS = 700
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def connect(rank: int, size: int, transport: str, directory: str, port: int) -> TensorParallelGroup:
    """Return the group; for `nodes`, every rank is a node."""
    if transport == "gloo":
        distributed_setup.has_shared_memory = lambda: False
    nodes = {}
    if transport == "nodes":
        secret = {"master_address": "127.0.0.1", "master_port": port, "cluster_key_file": "/unused"}
        nodes = {"num_nodes": size, "node_rank": rank, **secret}
    return make_group(group_config(directory, size, **nodes), rank, CPU)


def values(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return what this rank brings to a collective; sums of such numbers depend on their order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def check_one(group: TensorParallelGroup, seed: int, choice: random.Random) -> None:
    """Do a random collective, which `choice` makes the same on every rank, and compare with what it must give."""
    num_rows = choice.choice([1, 2, 5, choice.randrange(1, 60)] + [NUM_LARGE_ROWS] * (seed % 50 == 0))
    dtype, ranks = choice.choice(DTYPES), range(group.size)
    match choice.choice(["all_reduce", "gather", "broadcast", "barrier"]):
        case "all_reduce":
            shape = (num_rows, choice.randrange(1, 600))
            parts = [values(seed, rank, shape, dtype) for rank in ranks]
            assert torch.equal(group.all_reduce(parts[group.rank].clone()), in_rank_order(parts))
        case "gather":
            widths = [choice.randrange(1, 300) for _ in ranks]
            parts = [values(seed, rank, (num_rows, widths[rank]), dtype) for rank in ranks]
            gathered = group.gather_columns(parts[group.rank], widths)
            assert (gathered is None) == (group.rank != 0)
            assert gathered is None or torch.equal(gathered, torch.cat(parts, dim=1))
        case "broadcast":
            parts = [values(seed, rank, (choice.randrange(3000),), dtype) for rank in (0, 0)]
            received = parts[0].clone() if group.rank == 0 else torch.zeros_like(parts[0])
            assert torch.equal(group.broadcast(received), parts[0])
        case "barrier":
            group.barrier(60.0)


def ragged(group: TensorParallelGroup) -> None:
    choice, own_choice = random.Random(0), random.Random(group.rank)
    for seed in range(NUM_COLLECTIVES):
        if own_choice.random() < 0.05:
            time.sleep(own_choice.random() * 0.02)
        check_one(group, seed, choice)
    group.barrier(60.0)


def endless(group: TensorParallelGroup) -> None:
    print("started", flush=True)
    while True:
        group.all_reduce(torch.ones(8, 576))


def checksum(group: TensorParallelGroup) -> None:
    """The last rank executes another third step; the steps before are the same."""
    sum_of_steps, last = StepChecksum(), group.rank == group.size - 1
    for step in range(5):
        sum_of_steps.update(b"another step" if step == 2 and last else b"step %d" % step)
        token_ids = torch.arange(step) if group.rank == 0 else torch.zeros(step, dtype=torch.int64)
        assert broadcast_checked(group, token_ids, sum_of_steps.value).tolist() == list(range(step))
        print(step, flush=True)
        group.barrier(5.0)


SCENARIOS = {function.__name__: function for function in (ragged, endless, checksum)}


def main() -> None:
    rank, size, scenario, transport, directory, *port = sys.argv[1:]
    torch.set_num_threads(1)
    group = connect(int(rank), int(size), transport, directory, int(port[0]) if port else 1)
    try:
        SCENARIOS[scenario](group)
    except RuntimeError:
        traceback.print_exc()
        os._exit(1)  # as workers end: without a word to the others


if __name__ == "__main__":
    main()
