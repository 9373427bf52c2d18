"""Requests that share blocks, go to the host and come back say what they would have said."""

from __future__ import annotations

import pytest
import torch
from step_driver import StepDriver
from tiny_runner import NUM_OUTPUT, PROMPTS, make_runner, step_of

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import CopyKind, NewRequest
from octavo.worker.block_copies import Tier


def test_a_fork_reads_blocks_that_its_parent_writes_in_the_same_step(tiny_model, alone):
    """Full blocks are shared, the last one is copied when it is written."""
    runner, prompt = make_runner(tiny_model), PROMPTS["r2"]  # 17 tokens, blocks of 4
    params = SamplingParams(max_tokens=9, temperature=0.0)
    parent = NewRequest("parent", prompt, [], params, [5, 3, 9, 1, 7, 2], 0)
    fork = NewRequest("fork", prompt, [], params, [5, 3, 9, 1, 8, 4], 16)
    first = step_of(0, new_requests=[parent, fork], num_scheduled_tokens={"parent": 17, "fork": 1})
    assert runner.execute(first).sampled_token_ids == [alone["r2"][0]] * 2
    beam = NewRequest("beam", prompt, alone["r2"][:1], params, [5, 3, 9, 1, 6, 0], 17)
    second = step_of(1, copies=[(CopyKind.DEVICE, 7, 6)], new_requests=[beam], steady_joined=["parent", "beam", "fork"])
    assert runner.execute(second).sampled_token_ids == [alone["r2"][1]] * 3
    assert runner.execute(step_of(2)).sampled_token_ids == [alone["r2"][2]] * 3


@pytest.mark.parametrize("check", [False, True])
def test_swapped_requests_go_on_as_before(tiny_model, alone, check):
    """Their old blocks are given away in the very step that copies them, and they come back to other ones."""
    driver = StepDriver(make_runner(tiny_model, num_blocks=40, num_host_blocks=30, check=check), uses_steady=True)
    for request_id in ("r3", "r4"):
        driver.add(request_id, PROMPTS[request_id])
    driver.run_until(5, chunk=9)
    driver.swap_out("r4")
    driver.free_blocks = driver.free_blocks[::-1]  # the ones just freed first
    driver.add("r5", PROMPTS["r5"])
    driver.run_until(7, chunk=50)
    driver.drop("r3")
    driver.swap_in("r4")
    output = driver.step(r4=1, r5=1)
    assert output.corrupt_block_ids == []
    driver.run_until(NUM_OUTPUT, chunk=1)
    assert driver.requests["r4"].output == alone["r4"]
    assert driver.requests["r5"].output == alone["r5"]


def test_a_bit_that_flips_on_the_host_is_reported_and_the_step_runs(tiny_model, alone):
    driver = StepDriver(make_runner(tiny_model, num_host_blocks=30, check=True))
    for request_id in ("r3", "r4"):
        driver.add(request_id, PROMPTS[request_id])
    driver.run_until(5, chunk=9)
    host_blocks = driver.swap_out("r4")
    driver.step(r3=1)
    driver.runner.copier.caches[Tier.HOST].view(torch.uint8)[2, 1, host_blocks[3], 2, 1, 13] ^= 4
    blocks = driver.swap_in("r4")
    output = driver.step(r3=1, r4=1)
    assert output.corrupt_block_ids == [blocks[3]]
    assert driver.sampled.keys() == {"r3", "r4"}
    assert driver.requests["r3"].output == alone["r3"][:7]


def test_copies_are_reported_also_when_nothing_is_computed(tiny_model):
    runner = make_runner(tiny_model, num_host_blocks=3, check=True)
    assert runner.execute(step_of(copies=[(CopyKind.SWAP_IN, 1, 5)])).corrupt_block_ids == [5]
