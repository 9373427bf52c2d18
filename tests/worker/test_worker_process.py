"""The worker as the supervisor starts it: its reports, its steps, and its exit code when it cannot start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
import tiny_llama
from safetensors.torch import load_file, save_file

from octavo.protocol.codec import decode_worker_event, encode
from octavo.protocol.config import CacheConfig, ParallelConfig
from octavo.protocol.lifecycle import Command, ExitCode, Failed, Launch, Progress, Ready, decode_status, write_launch
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.transport import Listener, wait_readable
from octavo.protocol.worker_messages import CopyKind, ModelRunnerOutput, NewRequest, SchedulerOutput, WorkerReady

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def reference():
    return tiny_llama.build()


@pytest.fixture
def config(reference, tmp_path):
    directory = tiny_llama.save(reference, tmp_path / "model")
    with tempfile.TemporaryDirectory(prefix="oct") as sockets:  # a socket's path must be short
        config = tiny_llama.engine_config(directory)
        yield msgspec.structs.replace(config, ipc_directory=sockets, parallel=ParallelConfig(num_threads=1))


class WorkerProcess:
    """A worker and both of its pipes."""

    def __init__(self, config) -> None:
        read_fd, write_fd = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.worker"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[write_fd]
        )
        os.close(write_fd)
        self.statuses = os.fdopen(read_fd, "rb")
        write_launch(self.process.stdin.fileno(), Launch(config, os.getpid(), write_fd))

    def read_statuses(self) -> list:
        """Return what it reports until it is ready or ends."""
        statuses = []
        for line in self.statuses:
            statuses.append(decode_status(line))
            if isinstance(statuses[-1], Ready | Failed):
                break
        return statuses

    def end(self) -> int:
        self.process.stdin.close()
        code = self.process.wait(TIMEOUT_S)
        self.statuses.close()
        self.log = self.process.stderr.read().decode()
        self.process.stderr.close()
        return code


def next_event(listener):
    wait_readable([listener], TIMEOUT_S)
    peer, frame = listener.receive()
    assert peer == b"worker-0"
    return decode_worker_event(frame)


def test_it_starts_serves_steps_and_stops(config, reference):
    listener = Listener(config.worker_address)
    worker = WorkerProcess(config)
    try:
        *progress, ready = worker.read_statuses()
        assert isinstance(ready, Ready), worker.end() or worker.log
        assert all(isinstance(status, Progress) for status in progress)
        details = {status.phase: status.detail for status in progress}
        assert details["weights"].startswith("safetensors, float32, ")
        for words in ("MiB free", "largest step", "64 KV blocks of 16 tokens, 1024 tokens"):
            assert words in details["memory"]
        worker_ready = next_event(listener)
        assert isinstance(worker_ready, WorkerReady)
        assert (worker_ready.rank, worker_ready.num_device_blocks, worker_ready.num_host_blocks) == (0, 64, 0)
        assert worker_ready.prefill_tokens_per_s > 0
        assert worker_ready.copied_blocks_per_s == 0

        prompt, params = [3, 14, 15, 92], SamplingParams(max_tokens=9, temperature=0.0)
        new = NewRequest("a", prompt, [], params, [7, 5], 0)
        listener.send(b"worker-0", b"not a step")
        listener.send(b"worker-0", encode(SchedulerOutput(0, [], [], [new], [], [], [], {"a": 4})))
        listener.send(b"worker-0", encode(SchedulerOutput(1, [], [], [], [], [], ["a"], {})))
        first, second = tiny_llama.greedy(reference, prompt, 2)
        assert next_event(listener) == ModelRunnerOutput(0, [first])
        assert next_event(listener) == ModelRunnerOutput(1, [second])

        worker.process.stdin.write(bytes([Command.STOP]))
        worker.process.stdin.flush()
        assert worker.process.wait(TIMEOUT_S) == ExitCode.OK
    finally:
        worker.end()
        listener.close()
    assert "dropped a frame of 10 bytes" in worker.log


def test_a_worker_with_a_host_tier(config):
    cache = msgspec.structs.replace(config.cache, num_host_blocks=12, check_swapped_blocks=True)
    config = msgspec.structs.replace(config, cache=cache)
    listener = Listener(config.worker_address)
    worker = WorkerProcess(config)
    try:
        *progress, ready = worker.read_statuses()
        assert isinstance(ready, Ready), worker.end() or worker.log
        assert any("12 host blocks" in status.detail for status in progress)
        worker_ready = next_event(listener)
        assert worker_ready.num_host_blocks == 12
        assert worker_ready.copied_blocks_per_s > 0
        copies = [(CopyKind.SWAP_OUT, 3, 11), (CopyKind.SWAP_IN, 11, 4), (CopyKind.SWAP_IN, 10, 5)]
        listener.send(b"worker-0", encode(SchedulerOutput(0, [], copies, [], [], [], [], {})))
        assert next_event(listener) == ModelRunnerOutput(0, [], corrupt_block_ids=[5])
    finally:
        worker.end()
        listener.close()


def truncate(config):
    path = Path(config.model.path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return config


def reshape(config):
    path = Path(config.model.path) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, path)
    return config


def rename_architecture(config):
    path = Path(config.model.path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["LlamaForCausalML"]}))
    return config


def remove_config(config):
    (Path(config.model.path) / "config.json").unlink()
    return config


def ask_for_too_much(config):
    return msgspec.structs.replace(config, cache=CacheConfig(kv_cache_bytes=2**50))


def ask_for_too_large_a_host_tier(config):
    cache = msgspec.structs.replace(config.cache, swap_space_bytes=2**50)
    return msgspec.structs.replace(config, cache=cache)


def contradict_vocabulary(config):
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, vocab_size=161))


@pytest.mark.parametrize(
    ("spoil", "exit_code", "words"),
    [
        (truncate, ExitCode.BAD_WEIGHTS, ("model.safetensors", "tensor ", "truncated")),
        (reshape, ExitCode.BAD_WEIGHTS, ("model.safetensors: tensor model.norm.weight", "[47]", "[48]")),
        (rename_architecture, ExitCode.UNSUPPORTED_MODEL, ("LlamaForCausalML", "nearest: LlamaForCausalLM")),
        (remove_config, ExitCode.MODEL_NOT_FOUND, ("config.json",)),
        (ask_for_too_much, ExitCode.OUT_OF_MEMORY, ("MiB needed", "MiB free", "--kv-cache-memory")),
        (ask_for_too_large_a_host_tier, ExitCode.OUT_OF_MEMORY, ("host tier", "MiB needed", "--swap-space-gib")),
        (contradict_vocabulary, ExitCode.BAD_WEIGHTS, ("vocab_size is 160", "161")),
    ],
)
def test_a_start_that_fails_says_why(config, spoil, exit_code, words):
    worker = WorkerProcess(spoil(config))
    *_, failed = worker.read_statuses()
    assert worker.process.wait(TIMEOUT_S) == exit_code  # before its input ends, which is a reason to leave of its own
    worker.end()
    assert isinstance(failed, Failed)
    assert failed.exit_code == exit_code
    for word in words:
        assert word in failed.message
    assert "\n" not in failed.message
    assert "Traceback" not in worker.log


def test_it_ends_with_its_supervisor(config):
    worker = WorkerProcess(config)
    worker.process.stdin.close()
    assert worker.process.wait(TIMEOUT_S) == ExitCode.FAILURE
    worker.end()


def test_an_inconsistent_step_ends_the_process(config):
    listener = Listener(config.worker_address)
    worker = WorkerProcess(config)
    try:
        assert isinstance(worker.read_statuses()[-1], Ready)
        next_event(listener)
        listener.send(b"worker-0", encode(SchedulerOutput(0, [], [], [], [], [], [], {"nobody": 1})))
        assert worker.process.wait(TIMEOUT_S) == ExitCode.FAILURE
    finally:
        worker.end()
        listener.close()
