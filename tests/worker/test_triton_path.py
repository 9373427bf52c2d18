"""Whole steps of a model on the GPU's kernels, run in Triton's interpreter: the tokens of the references, in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_llama
import torch
import triton
from step_driver import StepDriver, poisoned_runner
from tiny_runner import PROMPTS, VOCAB_SIZE, make_runner

from octavo.kernels import registry
from octavo.worker.cpu_device import CpuDevice
from octavo.worker.graph import capture_graphs
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler
from octavo.worker.step_upload import PackedUploader

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the kernels are compiled for a GPU here")

NUM_OUTPUT = 3
NAMES = ("r0", "r1", "r2")


@pytest.fixture(params=[("triton",), ("deterministic", "triton")], ids=["fast", "deterministic"])
def choice(request):
    import triton_interpreter

    import octavo.kernels.triton.backends  # noqa: F401 - registers the kernels

    triton_interpreter.install()
    yield registry.select(*request.param)
    registry.select()


class RepeatedRun:
    """A graph of a device that has none: what was captured is run again, and its result goes to the same place."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.run = run
        self.result = run().fill_(torch.nan)

    def replay(self) -> None:
        self.result.copy_(self.run())


class RepeatingCpu(CpuDevice):
    """A CPU that is treated as a GPU: packed inputs at fixed places, and graphs."""

    has_graphs = True

    def make_uploader(self, num_bytes: int) -> PackedUploader:
        return PackedUploader(self, num_bytes)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[RepeatedRun, torch.Tensor]:
        graph = RepeatedRun(run)
        return graph, graph.result


def test_padded_decode_steps(tiny_model, alone, choice):
    """Three requests in the graph of four: its plan is padded, and what pads the batch writes nothing."""
    del choice
    device, states = RepeatingCpu(), RequestStates(4, tiny_llama.MAX_MODEL_LEN, 16)
    runner = poisoned_runner(tiny_model, Sampler(VOCAB_SIZE, ()), states, 16, 40, device=device)
    driver = StepDriver(runner, uses_steady=True)
    for name in NAMES:
        driver.add(name, PROMPTS[name])
    driver.run_until(1, chunk=50)
    max_blocks = states.block_tables.shape[1]
    runner.graphs = capture_graphs(device, runner.uploader, runner.forward, [4], max_blocks, runner.plan_capacity)
    runner.forward = None  # whatever runs now runs as a graph
    outputs = driver.run_until(NUM_OUTPUT, chunk=1)
    assert outputs == {name: alone[name][:NUM_OUTPUT] for name in NAMES}
    written = {block for request in driver.requests.values() for block in request.blocks}
    untouched = [block for block in range(40) if block not in written]
    assert runner.kv_cache[:, :, untouched].isnan().all()


def test_prefill_decode_and_a_resumed_request(tiny_model, alone, choice):
    """Chunks of prompts beside decodes, then decodes alone, then one that computes all of its tokens anew."""
    ops = ("paged_attention", "write_kv", "plan_attention", "rms_norm", "rotary", "linear", "sample_tokens")
    assert "torch" not in {choice[op] for op in ops}
    driver = StepDriver(make_runner(tiny_model, block_size=16, num_blocks=40), uses_steady=True)
    for name in NAMES:
        driver.add(name, PROMPTS[name])
    driver.run_until(NUM_OUTPUT - 1, chunk=9)
    driver.preempt("r1")
    driver.run_until(NUM_OUTPUT, chunk=50)
    for name in NAMES:
        assert driver.requests[name].output[:NUM_OUTPUT] == alone[name][:NUM_OUTPUT]
