"""What an operator sees at /metrics.

Everything is a plain number that one thread changes; a scrape turns the numbers into the Prometheus text. Gauges come
from the engine core's last EngineStats. Labels are closed sets (finish reasons, route templates, methods, classes of
status): nothing that a client wrote becomes a label. Rejected: prometheus_client's own counters, whose locks and label
look-ups cost more per token than the rest of this process's bookkeeping.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.utils import floatToGoString

from octavo.protocol.engine_messages import EngineStats

TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
FIRST_TOKEN_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0)
ENGINE_GAUGES = (  # name, field of EngineStats, help
    ("octavo_running_requests", "num_running_requests", "Requests that hold blocks."),
    ("octavo_waiting_requests", "num_waiting_requests", "Requests in the waiting queue, swapped ones included."),
    ("octavo_swapped_requests", "num_swapped_requests", "Requests whose KV blocks are on the host."),
    ("octavo_device_blocks", "num_total_blocks", "KV blocks on the device."),
    ("octavo_used_device_blocks", "num_used_blocks", "KV blocks on the device that requests hold."),
    ("octavo_cached_device_blocks", "num_cached_blocks", "KV blocks on the device that only the prefix cache keeps."),
    ("octavo_host_blocks", "num_total_host_blocks", "KV blocks on the host."),
    ("octavo_used_host_blocks", "num_used_host_blocks", "KV blocks on the host that swapped requests hold."),
)
ENGINE_COUNTERS = (
    ("octavo_steps", "num_steps", "Steps of the engine core."),
    ("octavo_scheduled_tokens", "num_scheduled_tokens", "Tokens computed in steps."),
    ("octavo_prefix_cache_queries", "num_prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    ("octavo_prefix_cache_hits", "num_cached_tokens", "Prompt tokens found in the prefix cache."),
    ("octavo_preemptions", "num_preemptions", "Preemptions of running requests."),
    ("octavo_recomputed_tokens", "num_recomputed_tokens", "Tokens computed again after a preemption."),
    ("octavo_swapped_out_blocks", "num_swapped_out_blocks", "KV blocks copied from the device to the host."),
    ("octavo_swapped_in_blocks", "num_swapped_in_blocks", "KV blocks copied from the host to the device."),
)
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class Histogram:
    """Observations counted by upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def family(self, name: str, help_text: str) -> HistogramMetricFamily:
        labels = [*map(floatToGoString, self.bounds), "+Inf"]
        buckets = list(zip(labels, accumulate(self.counts), strict=True))
        return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=self.sum)


class Metrics:
    """All numbers of this process."""

    def __init__(self) -> None:
        self.stats = NO_STATS
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_bad_frames = 0
        self.finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        self.http_requests: Counter[tuple[str, str, str]] = Counter()
        self.time_to_first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token = Histogram(TOKEN_BOUNDS_S)
        self.time_per_output_token = Histogram(TOKEN_BOUNDS_S)
        self.end_to_end = Histogram(REQUEST_BOUNDS_S)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def count_http(self, route: str, method: str, status: int) -> None:
        known = method if method in KNOWN_METHODS else "other"
        self.http_requests[route, known, f"{status // 100}xx"] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield every family; called by the registry at a scrape."""
        yield from self._gauges()
        yield from self._counters()
        yield self.time_to_first_token.family(
            "octavo_time_to_first_token_seconds", "From the arrival of a request to its first token."
        )
        yield self.inter_token.family("octavo_inter_token_seconds", "Between two outputs of a request.")
        yield self.time_per_output_token.family(
            "octavo_time_per_output_token_seconds", "Mean time per token after the first, of finished requests."
        )
        yield self.end_to_end.family(
            "octavo_request_duration_seconds", "From the arrival of a request to its last token."
        )

    def _gauges(self) -> Iterator[Metric]:
        stats = self.stats
        for name, field, help_text in ENGINE_GAUGES:
            yield GaugeMetricFamily(name, help_text, getattr(stats, field))
        usage = stats.num_used_blocks / stats.num_total_blocks if stats.num_total_blocks else 0.0
        yield GaugeMetricFamily("octavo_kv_usage_ratio", "Share of the device's KV blocks that requests hold.", usage)

    def _counters(self) -> Iterator[Metric]:
        for name, field, help_text in ENGINE_COUNTERS:
            yield CounterMetricFamily(name, help_text, getattr(self.stats, field))
        for name, help_text, value in (
            ("octavo_prompt_tokens", "Tokens of prompts whose first output came.", self.num_prompt_tokens),
            ("octavo_generation_tokens", "Tokens generated.", self.num_generation_tokens),
            ("octavo_bad_frames", "Frames from the engine core that could not be read.", self.num_bad_frames),
        ):
            yield CounterMetricFamily(name, help_text, value)
        finished = CounterMetricFamily("octavo_finished_requests", "Requests by how they ended.", labels=["reason"])
        for reason, count in self.finished.items():
            finished.add_metric([reason], count)
        yield finished
        http = CounterMetricFamily(
            "octavo_http_requests", "HTTP requests answered.", labels=["route", "method", "status"]
        )
        for key, count in self.http_requests.items():
            http.add_metric(list(key), count)
        yield http

    async def handle(self, request: web.Request) -> web.Response:
        """Answer GET /metrics."""
        return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
