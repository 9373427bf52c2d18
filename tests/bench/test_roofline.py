"""The model of the roofline on launches whose answer is known, and what it says of the kernels as they are."""

from __future__ import annotations

from typing import Any

import pytest
import roofline
from roofline import IDLE_LATENCY_S, LATENCY_S, LAUNCH_S, SUSTAINED, Forecast, Gpu, Launch, Work

START_S = LAUNCH_S + IDLE_LATENCY_S
GPU = Gpu("made up", "sm_90", 100, 1e9, 1e12, 1e15, 100)
PIPELINED = {"num_warps": 4, "num_stages": 3, "num_wide_loads": 48, "num_async_copies": 48, "shared_bytes": 98304}


def launch_of(num_programs: int, **changes: Any) -> Launch:
    options = {"resources": PIPELINED, "resident_blocks": 2, "num_bytes": 10**9, **changes}
    return Launch("kernel", num_programs, **options)


def seconds(launch: Launch) -> tuple[float, float]:
    prediction = roofline.predict_launch(launch, GPU)
    return prediction.hidden_s - START_S, prediction.serial_s - START_S


def test_enough_bytes_under_way_get_what_the_memory_sustains() -> None:
    assert seconds(launch_of(200)) == pytest.approx((1e-3 / SUSTAINED,) * 2)


def test_too_few_bytes_under_way_wait_for_the_memory() -> None:
    resources = {**PIPELINED, "shared_bytes": 3000}
    launch = launch_of(200, resources=resources)
    assert roofline.under_way_bytes(launch) == 2000
    assert seconds(launch)[0] == pytest.approx(10**9 / (200 * 2000 / LATENCY_S))
    assert roofline.predict_launch(launch, GPU).limits == {"latency"}


def test_a_kernel_without_a_pipeline_has_its_loads_under_way_and_no_more_than_all() -> None:
    resources = {**PIPELINED, "num_async_copies": 0, "num_wide_loads": 2}
    assert roofline.under_way_bytes(launch_of(100, resources=resources)) == 2 * 16 * 128
    assert roofline.under_way_bytes(launch_of(100, resources=resources, num_bytes=100_000)) == 1000


def test_few_programs_get_the_bandwidth_of_few_multiprocessors() -> None:
    launch = launch_of(2, resources={**PIPELINED, "shared_bytes": 10**9, "num_wide_loads": 10**6})
    assert seconds(launch)[0] == pytest.approx(10**9 / (2 * 64e9))


def test_one_block_too_many_is_another_wave_of_arithmetic() -> None:
    one_wave = seconds(launch_of(200, num_bytes=0, flops=200 * 10**10))[0]
    assert one_wave == pytest.approx(2e-3)
    assert seconds(launch_of(201, num_bytes=0, flops=201 * 10**10))[0] == pytest.approx(one_wave + 1e-3)


def test_softmax_is_hidden_or_not() -> None:
    launch = launch_of(100, resident_blocks=1, num_bytes=0, flops=100 * 10**10, num_scores=100 * 10**6)
    vector_s = 10**6 * (7 / 100 + 1 / 16) / 1e9
    assert seconds(launch) == pytest.approx((1e-3, 1e-3 + vector_s))


def test_what_kernels_pass_to_each_other_takes_time_and_does_not_count() -> None:
    forecast = Forecast(Work("op", [launch_of(200, num_bytes=5 * 10**8, extra_bytes=5 * 10**8)]), GPU)
    assert forecast.sustained_share.best == pytest.approx(50, rel=0.01)


def test_decode_attention_is_predicted_to_use_the_memory(show_at_the_end) -> None:
    forecasts = roofline.forecasts()
    show_at_the_end("roofline", roofline.table_of(forecasts))
    decode = [one for one in forecasts if one.work.name == "attention, decode of 64 × 2,048"]
    assert len(decode) == len(roofline.GPUS)
    for forecast in decode:
        assert forecast.sustained_share.worst >= 90, str(forecast)
