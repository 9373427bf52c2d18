"""Swap or recompute, and what the log says of a burst."""

import logging

import pytest
from scheduler_harness import SchedulerHarness, make_config

from octavo.engine_core.preemption import QUIET_STEPS_AFTER_A_BURST, PreemptionLog, is_swap_cheaper
from octavo.engine_core.request import Request
from octavo.protocol.config import PreemptionMode
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import WorkerReady

AUTO, SWAP, RECOMPUTE = PreemptionMode.AUTO, PreemptionMode.SWAP, PreemptionMode.RECOMPUTE


@pytest.mark.parametrize(
    ("mode", "num_tokens", "num_blocks", "copied_blocks_per_s", "prefill_tokens_per_s", "swaps"),
    [
        (SWAP, 1, 1000, 1.0, 1e9, True),
        (RECOMPUTE, 10**6, 1, 1e9, 1.0, False),
        (AUTO, 160, 10, 100.0, 100.0, True),  # 0.2 s of copies, 1.6 s of prefill
        (AUTO, 160, 10, 10.0, 100.0, False),  # 2 s of copies
        (AUTO, 160, 10, 12.5, 100.0, False),  # as long as each other: recompute needs no host memory
        (AUTO, 161, 10, 12.5, 100.0, True),
        (AUTO, 1, 1, 100.0, 1000.0, False),  # a block with one token is not worth two copies
        (AUTO, 16, 1, 100.0, 700.0, True),
        (AUTO, 160, 10, 0.0, 100.0, True),  # not measured: keep what was computed
        (AUTO, 160, 10, 100.0, 0.0, True),
    ],
)
def test_the_cheaper_one(mode, num_tokens, num_blocks, copied_blocks_per_s, prefill_tokens_per_s, swaps):
    speeds = WorkerReady(0, 100, 100, copied_blocks_per_s, prefill_tokens_per_s)
    assert is_swap_cheaper(num_tokens, num_blocks, mode, speeds) is swaps


def make_request(request_id, num_computed_tokens=10):
    command = AddRequest(request_id, [1], SamplingParams(max_tokens=99), 0.0)
    request = Request(command, (0, 0.0, 1, 0), make_config().model, b"root")
    request.num_computed_tokens = num_computed_tokens
    return request


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "octavo.engine_core.preemption"]


def test_a_burst_is_one_line_with_who_and_how_much(caplog):
    log = PreemptionLog()
    for step_id in range(20):
        log.add(make_request(f"r{step_id % 6}", num_computed_tokens=step_id), step_id, is_swapped=step_id % 4 == 0)
        log.end_burst(step_id)
    log.end_burst(19 + QUIET_STEPS_AFTER_A_BURST - 1)
    assert lines(caplog) == []
    log.end_burst(19 + QUIET_STEPS_AFTER_A_BURST)
    log.end_burst(19 + QUIET_STEPS_AFTER_A_BURST + 1)
    assert lines(caplog) == [
        "KV blocks were short: 20 preemptions of 6 requests (5 swapped to the host, 150 tokens given up): "
        "r0, r1, r2, r3 and 2 more"
    ]


def test_the_next_burst_is_counted_anew(caplog):
    log = PreemptionLog()
    for step_id in (0, 1000):
        log.add(make_request(f"r{step_id}"), step_id, is_swapped=False)
        log.end_burst(step_id + QUIET_STEPS_AFTER_A_BURST)
    assert [line.split(": ", 1)[1] for line in lines(caplog)] == [
        f"1 preemptions of 1 requests (0 swapped to the host, 10 tokens given up): r{step_id}" for step_id in (0, 1000)
    ]


def test_a_burst_of_the_scheduler_is_logged_once_it_is_over(caplog):
    """Memory for two, four requests: they push each other out; then one request decodes in peace."""
    caplog.set_level(logging.WARNING)
    harness = SchedulerHarness(
        make_config(block_size=1, num_device_blocks=40, max_num_seqs=4, max_model_len=600, eos_token_ids=())
    )
    for index in range(4):
        harness.new(f"r{index}", [index], float(index), max_tokens=25)
    harness.run()
    num_preemptions = harness.scheduler.counters.num_preemptions
    assert num_preemptions >= 3
    assert lines(caplog) == []
    for index in range(8):
        harness.new(f"peace {index}", [index], 100.0 + index, max_tokens=38)
        harness.run()
    (line,) = lines(caplog)
    assert line.startswith(f"KV blocks were short: {num_preemptions} preemptions of ")
    assert harness.scheduler.counters.num_preemptions == num_preemptions


@pytest.mark.parametrize(
    ("mode", "num_host_blocks", "speeds", "swaps"),
    [
        (AUTO, 40, (1e6, 1.0), True),
        (AUTO, 40, (1.0, 1e6), False),
        (AUTO, 0, (1e6, 1.0), False),
        (SWAP, 40, (1.0, 1e6), True),
        (RECOMPUTE, 40, (1e6, 1.0), False),
    ],
)
def test_the_scheduler_asks_the_workers_speeds(mode, num_host_blocks, speeds, swaps):
    config = make_config(
        block_size=1, num_device_blocks=40, num_host_blocks=num_host_blocks, preemption_mode=mode, eos_token_ids=()
    )
    harness = SchedulerHarness(config)
    harness.scheduler.memory = WorkerReady(0, 40, num_host_blocks, *speeds)
    for index in range(3):
        harness.new(f"r{index}", [index] * 3, float(index), max_tokens=25)
    harness.run()
    harness.check_outputs()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_out_blocks > 0) is swaps
    assert (stats.num_recomputed_tokens > 0) is not swaps
