"""How many blocks fit, and the tensor that holds them."""

from __future__ import annotations

import pytest
import tiny_llama
import torch

from octavo.protocol.config import CacheConfig
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.kv_cache import allocate_kv_cache, block_num_bytes, plan_num_blocks
from octavo.worker.models.config import read_config

CPU = torch.device("cpu")
BLOCK_BYTES = 1000


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tiny_llama.save(tiny_llama.build(), tmp_path_factory.mktemp("model"))
    return read_config(str(directory))


def plan(cache=None, max_model_len=64, free_bytes=1_000_000, step_bytes=200_000):
    return plan_num_blocks(cache or CacheConfig(), BLOCK_BYTES, max_model_len, free_bytes, step_bytes)


def test_a_share_of_what_the_largest_step_leaves():
    assert plan(CacheConfig(memory_utilization=0.5)) == 400
    assert plan(CacheConfig(memory_utilization=1.0)) == 800
    assert plan(CacheConfig(memory_utilization=0.25), step_bytes=0) == 250


def test_a_given_size_is_taken():
    assert plan(CacheConfig(kv_cache_bytes=3_999)) == 3
    assert plan(CacheConfig(num_device_blocks=7)) == 7
    assert plan(CacheConfig(num_device_blocks=7, kv_cache_bytes=5_000)) == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step_bytes": 1_000_000}, "the largest step: 1.0 MiB needed"),
        ({"cache": CacheConfig(block_size=16), "max_model_len": 16 * 401}, "--max-model-len"),
        ({"cache": CacheConfig(kv_cache_bytes=999)}, "raise --kv-cache-memory"),
    ],
)
def test_too_little_memory_names_the_flag(arguments, words):
    with pytest.raises(StartupError) as caught:
        plan(**arguments)
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
    assert words in caught.value.message


def test_the_longest_request_that_just_fits_is_accepted():
    assert plan(CacheConfig(block_size=16), max_model_len=16 * 400) == 400


def test_the_tensor_has_the_size_that_was_planned(config):
    for dtype in (torch.float32, torch.bfloat16):
        cache = allocate_kv_cache(config, 5, 4, dtype, CPU)
        assert cache.shape == (3, 2, 5, 4, 2, 8)
        assert cache.nbytes == 5 * block_num_bytes(config, 4, dtype)


def test_more_than_the_machine_has_is_refused(config):
    with pytest.raises(StartupError) as caught:
        allocate_kv_cache(config, 2**40, 16, torch.float32, CPU)
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
    assert "--num-device-blocks" in caught.value.message
