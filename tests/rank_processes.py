"""Runs a script as several ranks of a tensor-parallel group, each a process of its own, as workers are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from octavo.protocol.config import EngineConfig, ModelConfig, ParallelConfig, WeightsFormat
from octavo.worker.distributed import TensorParallelGroup
from octavo.worker.distributed_checksum import require_same, with_checksum

TESTS = Path(__file__).parent
PATIENCE_S = 100.0


def group_config(directory: Path | str, size: int, **parallel: Any) -> EngineConfig:
    """Return a config whose ranks meet in `directory`; it names no model."""
    model = ModelConfig(
        path="/unused",
        weights_path="/unused",
        weights_format=WeightsFormat.SAFETENSORS,
        served_model_names=("none",),
        max_model_len=1,
        vocab_size=1,
    )
    return EngineConfig(
        model=model,
        ipc_directory=str(directory),
        parallel=ParallelConfig(tensor_parallel_size=size, **parallel),
    )


@contextmanager
def running_ranks(script: Path, size: int, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start `python script <rank> <size> *arguments` for each rank; nothing of it is left after the block."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(size), *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def outputs_of(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Wait for all; return what each printed after checking that none failed."""
    results = [process.communicate(timeout=PATIENCE_S) for process in processes]
    for rank, (process, (_, errors)) in enumerate(zip(processes, results, strict=True)):
        assert process.returncode == 0, f"rank {rank}: {errors}"
    return [output for output, _ in results]


def broadcast_checked(group: TensorParallelGroup, token_ids: torch.Tensor, checksum: int) -> torch.Tensor:
    """Return rank 0's `token_ids`, int64 [S], by the calls of the model runner, but waiting for them.

    Raises RankDivergedError on a rank whose checksum is not rank 0's.
    """
    if group.size == 1:
        return token_ids
    received = group.broadcast(with_checksum(token_ids, checksum))
    require_same(int(received[-1]), checksum, group.rank)
    return received[:-1]
