"""Speed of the attention kernels alone: bytes/s of decode, FLOP/s of prefill, beside what the roofline predicts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import roofline
import torch
from gpu_part import Options, Report, run_part

from octavo.kernels.ops import attention
from octavo.protocol.config import DeviceKind, ParallelConfig
from octavo.worker.device_selection import select_device

HEADS = attention.HeadShape(32, 8, 128)
TINY_HEADS = attention.HeadShape(4, 2, 64)
BLOCK_SIZE = 16
NUM_RUNS, NUM_CALLS = 10, 10


class Work(NamedTuple):
    name: str
    query_lens: list[int]
    seq_lens: list[int]
    is_decode: bool


WORKS = (
    Work("decode of 64 × 2,048", [1] * 64, [2048] * 64, True),
    Work("decode of 256 × 2,048", [1] * 256, [2048] * 256, True),
    Work("decode of 1 × 32,768", [1], [32768], True),
    Work("prefill of 4 × 2,048", [2048] * 4, [2048] * 4, False),
    Work("prefill of 8,192", [8192], [8192], False),
)
TINY_WORKS = (Work("decode of 64 × 2,048", [1] * 3, [40] * 3, True), Work("prefill of 8,192", [20], [20], False))


def call_of(work: Work, heads: attention.HeadShape, device: torch.device) -> Callable[[], torch.Tensor]:
    """Attention of one layer, with the blocks of each request all over the cache."""
    num_blocks = [-(-length // BLOCK_SIZE) for length in work.seq_lens]
    tables = torch.zeros(len(num_blocks), max(num_blocks), dtype=torch.int32)
    order = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for table, own in zip(tables, order.split(num_blocks), strict=True):
        table[: len(own)] = own
    cache = torch.randn(2, len(order), BLOCK_SIZE, *heads[1:], device=device).to(torch.bfloat16)
    query = torch.randn(sum(work.query_lens), heads.num_query_heads, heads.head_dim, device=device).to(torch.bfloat16)
    query_lens, seq_lens = np.array(work.query_lens, np.int32), np.array(work.seq_lens, np.int32)
    plan = attention.plan_attention(query_lens, seq_lens, heads)
    if plan is not None:
        plan = plan.to(device)
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)).to(device)
    lens, tables = torch.from_numpy(seq_lens).to(device), tables.to(device)
    scale, out = heads.head_dim**-0.5, torch.empty_like(query)
    return lambda: attention.paged_attention(query, cache, starts, lens, tables, scale, out, plan=plan)


def seconds_of(call: Callable[[], torch.Tensor], device: torch.device) -> float:
    """The median of some runs; on a GPU of a graph of some calls, so that the host has no part in it."""
    if device.type == "cpu":
        started_s = time.perf_counter()
        call()
        return time.perf_counter() - started_s
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(NUM_CALLS):
            call()
    graph.replay()
    times_ms = []
    for _ in range(NUM_RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end) / NUM_CALLS)
    return sorted(times_ms)[NUM_RUNS // 2] / 1e3


def gpu_called(name: str) -> roofline.Gpu | None:
    """The data sheet of a GPU that torch calls by this name."""
    return next((gpu for gpu in roofline.GPUS if gpu.name.split()[0] in name), None)


def predictions_for(gpu: roofline.Gpu | None) -> dict[str, roofline.Forecast]:
    """By name of the work; none for a GPU that the roofline does not know."""
    found = [] if gpu is None else roofline.forecasts((gpu,))
    return {forecast.work.name.removeprefix("attention, "): forecast for forecast in found}


def describe(amount: float, seconds: float, peak: float | None, unit: str, predicted_s: float | None) -> str:
    text = f"{seconds * 1e6:.1f} µs, {amount / seconds / 1e12:.2f} {unit}"
    text += f", {100 * amount / seconds / peak:.0f} % of peak" if peak else ""
    return text + (f"; predicted at best {predicted_s * 1e6:.1f} µs" if predicted_s else "")


def main(options: Options, report: Report) -> None:
    device = select_device(ParallelConfig(device=options.device), 0)
    device.select_kernels(is_deterministic=False)
    heads, works = (TINY_HEADS, TINY_WORKS) if options.is_tiny else (HEADS, WORKS)
    is_gpu = options.device is not DeviceKind.CPU
    gpu = gpu_called(torch.cuda.get_device_name()) if is_gpu else None
    forecasts = predictions_for(gpu)
    for work in works:
        seconds = seconds_of(call_of(work, heads, device.torch_device), device.torch_device)
        predicted_s = forecasts[work.name].hidden_s if work.name in forecasts else None
        if work.is_decode:
            num_bytes = 2 * 2 * sum(work.seq_lens) * heads.num_kv_heads * heads.head_dim
            text = describe(num_bytes, seconds, gpu and gpu.peak_bytes_per_s, "TB/s", predicted_s)
        else:
            pairs = sum(n * s - n * (n - 1) // 2 for n, s in zip(work.query_lens, work.seq_lens, strict=True))
            flops = 4 * heads.head_dim * heads.num_query_heads * pairs
            text = describe(flops, seconds, gpu and gpu.peak_flops, "TFLOP/s", predicted_s)
        report.add(work.name, text)


if __name__ == "__main__":
    run_part(main)
