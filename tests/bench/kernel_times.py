"""Time of every op at the shapes of SmolLM2-135M: `python tests/bench/kernel_times.py --threads 2 --dtype bfloat16`.

The best of many runs, in ms; where an op is bound by memory, with the bytes that it must move per second.
"""

import argparse
import time
from collections.abc import Callable

import torch

from octavo.kernels.ops.activation import silu_mul
from octavo.kernels.ops.attention import copy_blocks, paged_attention, write_kv
from octavo.kernels.ops.linear import linear
from octavo.kernels.ops.norm import rms_norm
from octavo.kernels.ops.philox import philox_uniform
from octavo.kernels.ops.rotary import rotary
from octavo.kernels.ops.sampling import sample_tokens

NUM_RUNS = 30
NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE = 576, 1536, 49152
LINEAR_SHAPES = {"qkv": (576, 960), "out": (576, 576), "gate_up": (576, 3072), "down": (1536, 576)}


def report(name: str, operation: Callable[[], object], num_bytes: int = 0) -> None:
    """Print one line of the table."""
    times_s = []
    for _ in range(NUM_RUNS):
        started_s = time.perf_counter()
        operation()
        times_s.append(time.perf_counter() - started_s)
    best_s = min(times_s)
    speed = f"{num_bytes / best_s / 1e9:8.1f} GB/s" if num_bytes else ""
    print(f"{name:<44} {best_s * 1e3:9.3f} ms {speed}", flush=True)


def report_linear(dtype: torch.dtype) -> None:
    for name, (num_inputs, num_outputs) in {**LINEAR_SHAPES, "head": (HIDDEN_SIZE, VOCAB_SIZE)}.items():
        weight = torch.randn(num_outputs, num_inputs).to(dtype)
        for num_rows in (1, 8, 32, 512) if name != "head" else (1, 8, 32):
            x = torch.randn(num_rows, num_inputs).to(dtype)
            num_bytes = weight.nbytes if num_rows <= 8 else 0
            report(f"linear {name}, {num_rows} rows", lambda x=x, weight=weight: linear(x, weight), num_bytes)


def report_attention(dtype: torch.dtype) -> None:
    steps = {
        "1 decode, context 300": ([1], [300]),
        "8 decode, context 300": ([1] * 8, [300] * 8),
        "32 decode, context 300": ([1] * 32, [300] * 32),
        "32 decode, contexts 16 to 2000": ([1] * 32, list(range(16, 2048, 64))),
        "prefill of 512": ([512], [512]),
        "31 decode and a prefill of 481": ([1] * 31 + [481], [300] * 31 + [481]),
    }
    for name, (query_lens, seq_lens) in steps.items():
        max_blocks = -(-max(seq_lens) // BLOCK_SIZE)
        num_blocks = max_blocks * len(seq_lens)
        block_tables = torch.randperm(num_blocks, dtype=torch.int32).view(len(seq_lens), max_blocks)
        kv_cache = torch.randn(2, num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM).to(dtype)
        query = torch.randn(sum(query_lens), NUM_QUERY_HEADS, HEAD_DIM).to(dtype)
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        arguments = (query, kv_cache, starts, torch.tensor(seq_lens, dtype=torch.int32), block_tables, HEAD_DIM**-0.5)
        num_bytes = sum(seq_lens) * 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize if max(query_lens) == 1 else 0
        report(f"paged_attention, {name}", lambda arguments=arguments: paged_attention(*arguments), num_bytes)


def report_cache(dtype: torch.dtype) -> None:
    cache = torch.zeros(30, 2, 200, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, dtype=dtype)
    key = torch.randn(512, NUM_KV_HEADS, HEAD_DIM).to(dtype)
    slots = torch.randperm(200 * BLOCK_SIZE)[:512]
    report("write_kv, 512 tokens", lambda: write_kv(key, key, cache[0], slots), 4 * key.nbytes)
    pairs = [(block_id, block_id + 100) for block_id in range(20)]
    report("copy_blocks, 20 blocks, 30 layers", lambda: copy_blocks(cache, cache, pairs), 2 * cache[:, :, :20].nbytes)


def report_small_ops(dtype: torch.dtype) -> None:
    cos_sin = torch.randn(2048, HEAD_DIM)
    for num_rows in (1, 32, 512):
        x = torch.randn(num_rows, HIDDEN_SIZE).to(dtype)
        weight = torch.randn(HIDDEN_SIZE).to(dtype)
        gate_up = torch.randn(num_rows, 2 * INTERMEDIATE_SIZE).to(dtype)
        query = torch.randn(num_rows, NUM_QUERY_HEADS, HEAD_DIM).to(dtype)
        positions = torch.arange(num_rows)
        report(f"rms_norm, {num_rows} rows", lambda x=x, w=weight: rms_norm(x, w, 1e-5), 2 * x.nbytes)
        report(f"rms_norm + residual, {num_rows} rows", lambda x=x, w=weight: rms_norm(x, w, 1e-5, x), 4 * x.nbytes)
        report(f"silu_mul, {num_rows} rows", lambda gate_up=gate_up: silu_mul(gate_up), gate_up.nbytes * 3 // 2)
        report(f"rotary, {num_rows} rows", lambda q=query, p=positions: rotary(q, q, p, cos_sin), 4 * query.nbytes)


def report_sampling() -> None:
    num_rows = 32
    logits = torch.randn(num_rows, VOCAB_SIZE) * 3
    rows = torch.arange(num_rows)
    uniforms = philox_uniform(rows, rows, rows, rows)
    report("philox_uniform, 32 rows", lambda: philox_uniform(rows, rows, rows, rows))
    ones = torch.ones(num_rows)
    options = {
        "greedy": (ones * 0, None, None, None),
        "temperature": (ones, None, None, None),
        "min_p 0.05": (ones, None, None, ones * 0.05),
        "top_k 40": (ones, torch.full_like(rows, 40), None, None),
        "top_p 0.9, peaked logits": (ones * 0.4, None, ones.double() * 0.9, None),
        "top_p 0.9, flat logits": (ones, None, ones.double() * 0.9, None),
    }
    for name, values in options.items():
        report(f"sample_tokens, 32 rows, {name}", lambda values=values: sample_tokens(logits, *values, uniforms))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    report_small_ops(dtype)
    report_linear(dtype)
    report_attention(dtype)
    report_cache(dtype)
    report_sampling()


if __name__ == "__main__":
    main()
