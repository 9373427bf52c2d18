"""The cost model: its arithmetic worked out by hand, and what it says about a machine that was measured."""

import pytest

from octavo.simulator.cost_model import CostModel, StepLoad, attention_pairs
from octavo.simulator.devices import DEVICES, MODELS, Device, Model

# 100 bytes/s and 1,000 flop/s after the shares; 10 bytes of weights are read; 16 bytes of KV and 8 attention flops.
DEVICE = Device(1000, 200.0, 2000.0, 80.0, compute_share=0.5, memory_share=0.5, link_share=0.5, step_overhead_s=1.0)
MODEL = Model(6, 4, 1, num_layers=2, num_heads=1, num_kv_heads=2, head_dim=1, max_model_len=64)
BY_HAND = CostModel(DEVICE, MODEL, block_size=4)  # a block has 64 bytes


def test_a_small_step_is_bound_by_memory():
    step_s = BY_HAND.step_s(StepLoad(1, 1, num_kv_tokens=50, num_attention_pairs=50))
    assert step_s == pytest.approx(1.0 + 10 / 100 + 50 * 16 / 100)


def test_a_large_step_is_bound_by_arithmetic():
    step_s = BY_HAND.step_s(StepLoad(300, 7, 10, 1000))
    assert step_s == pytest.approx(1.0 + 2 * (300 * 4 + 7 * 1) / 1000 + 1000 * 8 / 1000)


def test_copies_come_on_top():
    without_s = BY_HAND.step_s(StepLoad(1, 1, 1, 1))
    assert BY_HAND.step_s(StepLoad(1, 1, 1, 1, num_link_copies=5)) - without_s == pytest.approx(5 * 64 / 40)
    assert BY_HAND.step_s(StepLoad(1, 1, 1, 1, num_device_copies=5)) - without_s == pytest.approx(5 * 64 * 2 / 100)


def test_devices_together_are_as_fast_as_their_sum():
    load = StepLoad(300, 7, 10, 1000, 5)
    both = CostModel(DEVICE, MODEL, 4, num_devices=2)
    assert both.step_s(load) - 1 == pytest.approx((BY_HAND.step_s(load) - 1) / 2)
    assert both.num_device_blocks() == (1800 - 12) // 64


def test_what_a_worker_would_report():
    assert BY_HAND.num_device_blocks() == (900 - 12) // 64
    assert BY_HAND.copied_blocks_per_s() == pytest.approx(40 / 64)
    assert BY_HAND.prefill_tokens_per_s(3) == pytest.approx(3 / (1 + 0.1 + 3 * 16 / 100))
    with pytest.raises(ValueError, match="num-devices"):
        CostModel(DEVICE, Model(449, 4, 1, 2, 1, 2, 1, 64), 4).num_device_blocks()


@pytest.mark.parametrize(
    ("num_context_tokens", "num_tokens", "num_pairs"), [(0, 1, 1), (9, 1, 10), (0, 3, 6), (4, 2, 11)]
)
def test_each_token_meets_its_context_and_itself(num_context_tokens, num_tokens, num_pairs):
    assert attention_pairs(num_context_tokens, num_tokens) == num_pairs


@pytest.mark.parametrize(
    ("load", "measured_ms"),
    [
        (StepLoad(1, 1, 300, 300), 8.6),
        (StepLoad(8, 8, 2400, 2400), 11.3),
        (StepLoad(32, 32, 9600, 9600), 32.6),
        (StepLoad(64, 64, 19_200, 19_200), 63.7),
        (StepLoad(512, 1, 512, attention_pairs(0, 512)), 303),
    ],
)
def test_the_cpu_preset_gives_the_measured_times(load, measured_ms):
    """SmolLM2-135M in bf16, two threads: decode steps at a context of 300 tokens, and a prompt; within 15 %."""
    step_s = CostModel(DEVICES["cpu"], MODELS["smollm2-135m"], 16).step_s(load)
    assert step_s * 1e3 == pytest.approx(measured_ms, rel=0.15)


def test_the_memory_for_kv_is_that_of_the_paper():
    """PagedAttention paper, table 1: OPT-13B on an A100 with 40 GB has 15.7K KV slots."""
    num_blocks = CostModel(DEVICES["a100-40g"], MODELS["opt-13b"], 16).num_device_blocks()
    assert num_blocks * 16 == pytest.approx(15_700, rel=0.02)
    assert MODELS["opt-13b"].kv_bytes_per_token == 800 * 1024
