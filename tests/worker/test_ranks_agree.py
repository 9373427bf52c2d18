"""What the ranks of a group have to have alike, although their memory differs."""

from __future__ import annotations

from functools import partial

import pytest
import tiny_llama
from inline_engine import SilentReporter
from rank_threads import run_at_once, thread_groups

from octavo.protocol.config import CacheConfig, EngineConfig, ParallelConfig
from octavo.worker import worker
from octavo.worker.models.config import read_config
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
