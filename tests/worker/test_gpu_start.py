"""The start of a worker on a GPU: what it measures, allocates, captures and says; and what it says when it cannot."""

from __future__ import annotations

import msgspec
import pytest
import tiny_llama
import torch
from fake_device import MIB, FakeGpu
from inline_engine import SilentReporter

from octavo.kernels import registry
from octavo.kernels.ops.attention import plan_attention
from octavo.protocol.config import CacheConfig, ParallelConfig
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker import largest_step, worker
from octavo.worker.models.config import read_config
from octavo.worker.worker import build_runner

BLOCK_BYTES = 2 * 3 * 2 * 8 * 16 * 4  # keys and values, layers, heads, their size, tokens, fp32


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama.save(tiny_llama.build(), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _references():
    yield
    registry.select()


@pytest.fixture
def gpu():
    with FakeGpu() as gpu:
        yield gpu


def start(directory, gpu, cache=None, **parallel):
    config = tiny_llama.engine_config(directory)
    parallel = ParallelConfig(num_threads=1, **parallel)
    config = msgspec.structs.replace(config, cache=cache or CacheConfig(), parallel=parallel)
    reporter = SilentReporter()
    runner, ready = build_runner(config, read_config(config.model.path), reporter, device=gpu)
    return runner, ready, {status.phase: status.detail for status in reporter.sent}


def test_blocks_fill_what_weights_steps_and_graphs_leave(directory, gpu):
    """90 % of 1000 MiB, without 100 in use, 50 for the largest step, 10 and 8 for each of 5 graphs."""
    runner, ready, details = start(directory, gpu)
    left_bytes = (900 - 100 - 50 - 10 - 5 * 8) * MIB
    assert ready.num_device_blocks == left_bytes // BLOCK_BYTES
    assert runner.kv_cache.shape == (3, 2, ready.num_device_blocks, 16, 2, 8)
    assert runner.kv_cache.device == gpu.torch_device
    assert "900 MiB free, largest step 50 MiB, graphs about 50 MiB" in details["memory"]
    assert details["graphs"] == "5 graphs up to 16 requests, 5 MiB"
    assert ready.prefill_tokens_per_s > 0


def test_an_eager_worker_keeps_nothing_for_graphs(directory, gpu):
    runner, ready, details = start(directory, gpu, enforce_eager=True)
    assert ready.num_device_blocks == (900 - 100 - 50) * MIB // BLOCK_BYTES
    assert "graphs" not in details
    assert runner.graphs.sizes == []


def test_a_decode_step_of_long_shared_contexts_may_be_the_largest(directory, gpu):
    gpu.peaks_bytes[1] = 70 * MIB
    assert "largest step 70 MiB" in start(directory, gpu)[2]["memory"]


@pytest.mark.parametrize(
    ("cache", "num_blocks"),
    [(CacheConfig(num_device_blocks=7), 7), (CacheConfig(kv_cache_bytes=9 * BLOCK_BYTES + 1), 9)],
)
def test_a_size_that_was_given_is_taken(directory, gpu, cache, num_blocks):
    assert start(directory, gpu, cache)[1].num_device_blocks == num_blocks


def test_the_host_tier_is_pinned_and_takes_nothing_from_the_device(directory, gpu):
    cache = CacheConfig(swap_space_bytes=20 * BLOCK_BYTES)
    runner, ready, details = start(directory, gpu, cache)
    assert ready.num_host_blocks == 20
    host_cache = runner.copier.caches[1]
    assert host_cache.untyped_storage().data_ptr() in gpu.pinned
    assert ready.num_device_blocks == (900 - 100 - 50 - 10 - 40) * MIB // BLOCK_BYTES
    assert "20 host blocks" in details["memory"]
    assert ready.copied_blocks_per_s > 0


def refuse(directory, gpu, cache=None) -> str:
    with pytest.raises(StartupError) as caught:
        start(directory, gpu, cache)
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
    assert "\n" not in caught.value.message
    return caught.value.message


def test_too_little_for_the_largest_step(directory, gpu):
    gpu.num_bytes_used = 860 * MIB
    message = refuse(directory, gpu)
    for words in ("the largest step in the fake GPU", "100.0 MiB needed, 140.0 MiB free", "--max-num-batched-tokens"):
        assert words in message


def test_too_little_for_the_longest_request(directory, gpu):
    gpu.num_bytes_used = 900 * MIB - 100 * MIB - 12 * BLOCK_BYTES
    assert "one request of 200 tokens in the fake GPU" in refuse(directory, gpu)


def test_too_little_for_the_weights(directory, gpu):
    gpu.num_bytes_used = gpu.num_bytes_total - 100
    assert "not enough memory for the weights" in refuse(directory, gpu)


def test_graphs_that_take_more_than_was_thought(directory, gpu):
    """They are captured when the KV cache is there; the largest step has to fit beside both."""
    gpu.graph_bytes = 180 * MIB
    message = refuse(directory, gpu)
    for words in ("the largest step beside the graphs: 50.0 MiB needed, 0.0 MiB free", "--enforce-eager"):
        assert words in message


def test_kernels_are_named_once_and_exceptions_in_words(caplog):
    with caplog.at_level("INFO"):
        worker._log_kernels({"linear": "deterministic", "rotary": "triton", "rms_norm": "triton"})
        worker._log_kernels({})
    assert caplog.messages == ["kernels: triton, but linear on deterministic"]


def test_ranks_that_would_compute_in_other_dtypes_are_refused(gpu):
    class Group:
        rank = 3

        def broadcast(self, x):
            return torch.tensor([1])

    dtypes = list(worker.TORCH_DTYPES.values())
    worker._agree_on_dtype(worker.Place(gpu, Group(), dtypes[1], dtypes[1]))
    with pytest.raises(StartupError, match=r"rank 3 would compute in torch.float32, rank 0 in .*: give --dtype"):
        worker._agree_on_dtype(worker.Place(gpu, Group(), dtypes[0], dtypes[0]))


def test_kernels_for_short_steps_with_long_contexts_are_compiled_at_the_start(directory, gpu, monkeypatch):
    """One token and several at once, each over the longest context: other kernels than the largest step has."""
    steps = []

    def plan(query_lens, seq_lens, heads):
        steps.append((query_lens.tolist(), seq_lens.tolist()))
        return plan_attention(query_lens, seq_lens, heads)

    monkeypatch.setattr(largest_step, "plan_attention", plan)
    start(directory, gpu, enforce_eager=True)
    longest = tiny_llama.MAX_MODEL_LEN
    assert ([1, 16], [longest, longest]) in steps
