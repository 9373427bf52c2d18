"""The Prometheus text: names, types, and that the numbers add up."""

import re
from pathlib import Path

from http_rig import EOS_ID, running, says
from prometheus_client.parser import text_string_to_metric_families

from octavo.api_server.metrics import Histogram, Metrics
from octavo.protocol.engine_messages import EngineStats, FinishReason


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    values = {(sample.name, sample.labels.get("le")): sample.value for sample in histogram.family("x", "").samples}
    assert values == {
        ("x_bucket", "1.0"): 2,
        ("x_bucket", "2.0"): 3,
        ("x_bucket", "+Inf"): 4,
        ("x_count", None): 4,
        ("x_sum", None): 6.0,
    }


def test_gauges_come_from_the_engines_stats() -> None:
    metrics = Metrics()
    metrics.stats = EngineStats(3, 5, 25, 100, 7, 70, 2, 4, 30, 6, 50, 900, 320, 11, 12, 13)
    values = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    expected = {
        "octavo_running_requests": 3,
        "octavo_waiting_requests": 5,
        "octavo_swapped_requests": 4,
        "octavo_kv_usage_ratio": 0.25,
        "octavo_device_blocks": 100,
        "octavo_used_device_blocks": 25,
        "octavo_cached_device_blocks": 30,
        "octavo_host_blocks": 50,
        "octavo_used_host_blocks": 6,
        "octavo_steps_total": 7,
        "octavo_scheduled_tokens_total": 70,
        "octavo_preemptions_total": 2,
        "octavo_recomputed_tokens_total": 11,
        "octavo_swapped_out_blocks_total": 12,
        "octavo_swapped_in_blocks_total": 13,
        "octavo_prefix_cache_queries_total": 900,
        "octavo_prefix_cache_hits_total": 320,
    }
    assert {name: values[name] for name in expected} == expected


async def test_counters_equal_what_the_client_saw(tmp_path: Path) -> None:
    script = says("abc", finish_reason=FinishReason.STOP, stop_token_id=EOS_ID, interval_s=0.001)
    async with running(tmp_path, script) as rig:
        prompt_tokens = completion_tokens = 0
        for fields in ({"max_tokens": 3}, {"max_tokens": 2, "n": 3}, {"max_tokens": 9, "stop": "b"}):
            _, answer = await rig.complete(**fields)
            prompt_tokens += answer["usage"]["prompt_tokens"]
            completion_tokens += answer["usage"]["completion_tokens"]
        await rig.complete(max_tokens=-1)
        async with rig.session.get("/client/chosen/path") as response:
            assert response.status == 404
        async with rig.session.request("PROPFIND", "/health") as response:
            assert response.status == 405
        async with rig.session.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=")
            text = await response.text()
    values = samples(text)

    def value(name: str, **labels: str) -> float:
        return values[name, tuple(sorted(labels.items()))]

    assert value("octavo_prompt_tokens_total") == prompt_tokens
    assert value("octavo_generation_tokens_total") == completion_tokens
    assert value("octavo_finished_requests_total", reason="stop") == 2
    assert value("octavo_finished_requests_total", reason="length") == 3
    assert value("octavo_finished_requests_total", reason="abort") == 0
    for name in ("time_to_first_token", "request_duration"):
        assert value(f"octavo_{name}_seconds_count") == 5
    assert value("octavo_time_per_output_token_seconds_count") == 5
    assert value("octavo_inter_token_seconds_count") == completion_tokens - 5
    route = "/v1/completions"
    assert value("octavo_http_requests_total", route=route, method="POST", status="2xx") == 3
    assert value("octavo_http_requests_total", route=route, method="POST", status="4xx") == 1
    assert value("octavo_http_requests_total", route="unmatched", method="GET", status="4xx") == 1
    assert value("octavo_http_requests_total", route="unmatched", method="other", status="4xx") == 1
    assert "/client/chosen/path" not in text
    assert "PROPFIND" not in text
    assert "_created" not in text
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert all(re.fullmatch(r"octavo_[a-z_]+", name) for name in names)
