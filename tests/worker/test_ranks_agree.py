"""What the ranks of a group have to have alike, although their memory differs."""

from __future__ import annotations

from functools import partial

import pytest
import tiny_llama
import torch
from inline_engine import SilentReporter
from rank_threads import run_at_once, run_ranks, thread_groups
from tiny_runner import CPU, make_runner, step_of

from octavo.protocol.config import CacheConfig, EngineConfig, ParallelConfig
from octavo.protocol.worker_messages import CopyKind
from octavo.worker import worker
from octavo.worker.block_copies import Tier
from octavo.worker.models.config import read_config
from octavo.worker.weight_loader import load_model
from octavo.worker.worker import build_runner

NUMS_BLOCKS = (40, 24, 31)  # that each rank has memory for


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """The runner of each rank, and what it reports."""
    directory = tiny_llama.save(tiny_llama.build(num_key_value_heads=6), tmp_path)
    groups = thread_groups(len(NUMS_BLOCKS))
    monkeypatch.setattr(worker, "make_group", lambda config, rank, device: groups[rank])
    plain = tiny_llama.engine_config(directory)
    builds = []
    for rank, num_blocks in enumerate(NUMS_BLOCKS):
        parallel = ParallelConfig(tensor_parallel_size=len(groups), num_threads=1)
        config = EngineConfig(
            model=plain.model,
            cache=CacheConfig(num_device_blocks=num_blocks),
            scheduler=plain.scheduler,
            parallel=parallel,
            ipc_directory=plain.ipc_directory,
        )
        builds.append(partial(build_runner, config, read_config(plain.model.path), SilentReporter(), rank))
    return run_at_once(groups, builds)


def test_all_have_the_blocks_of_the_smallest(ranks):
    """Which steps run as graphs follows from the number of blocks, and all ranks have to choose alike."""
    assert [ready.num_device_blocks for _, ready in ranks] == [min(NUMS_BLOCKS)] * len(NUMS_BLOCKS)
    assert {runner.kv_cache.shape[2] for runner, _ in ranks} == {min(NUMS_BLOCKS)}


def test_a_block_that_is_corrupt_on_one_rank_is_given_up_by_all(tmp_path):
    """Only rank 0 answers, so it has to know."""
    config = tiny_llama.engine_config(tiny_llama.save(tiny_llama.build(), tmp_path))

    def work(group):
        model = load_model(config.model, read_config(config.model.path), torch.float32, CPU, group)
        runner = make_runner(model, num_host_blocks=4, check=True)
        runner.group = group
        for host_block in (1, 2):
            runner.execute(step_of(copies=[(CopyKind.SWAP_OUT, host_block, host_block)]))
        if group.rank == 1:
            runner.copier.caches[Tier.HOST].view(torch.uint8)[0, 0, 2] ^= 1
        copies = [(CopyKind.SWAP_IN, 1, 5), (CopyKind.SWAP_IN, 2, 6)]
        return runner.execute(step_of(copies=copies)).corrupt_block_ids

    assert run_ranks(2, work) == [[6], [6]]
