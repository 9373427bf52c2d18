"""What too little KV memory costs: the embedded model with a pool for a share of the demand, against a roomy pool.

    PYTHONPATH=tests python tests/bench/memory_pressure.py [--requests 64] [--prompt 32] [--output 64] [--share 0.6]

All requests come at once and run to the same length. Slowdown is the time to the end of all, over that with a roomy
pool; recomputed tokens are those that a preemption made necessary, useful ones all others. Every run must give the
same tokens.
"""

from __future__ import annotations

import argparse
import time

from embedded_model import embedded_model_config, locate_embedded_model
from inline_engine import InlineEngine
from sharing import prompts

from octavo.api_server.model_source import Location
from octavo.protocol.config import CacheConfig, PreemptionMode, SchedulerConfig
from octavo.protocol.engine_messages import AddRequest, EngineStats
from octavo.protocol.sampling_params import SamplingParams

BLOCK_SIZE = 16


def run(
    model: Location, commands: list[AddRequest], num_blocks: int, num_host_blocks: int, mode: PreemptionMode
) -> tuple[float, EngineStats, list[list[int]], int]:
    """Return seconds, what the engine core counted, the outputs, and the most preemptions of one request."""
    cache = CacheConfig(block_size=BLOCK_SIZE, num_device_blocks=num_blocks, num_host_blocks=num_host_blocks)
    scheduler = SchedulerConfig(max_num_seqs=len(commands), preemption_mode=mode)
    config = embedded_model_config(model.path, model.weights_path, cache, scheduler, max_model_len=512)
    engine = InlineEngine(config)
    most = 0

    def observe() -> None:
        nonlocal most
        most = max(most, *(request.num_preemptions for request in engine.core.scheduler.requests.values()))

    start = time.perf_counter()
    ends = engine.run(commands, observe)
    return time.perf_counter() - start, engine.core.stats(), [end.token_ids for end in ends], most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each output")
    parser.add_argument("--share", type=float, default=0.6, help="pool ÷ demand")
    options = parser.parse_args()
    model = locate_embedded_model()
    params = SamplingParams(max_tokens=options.output, temperature=0.0, ignore_eos=True)
    commands = [
        AddRequest(f"r{index}", prompt, params, float(index))
        for index, prompt in enumerate(prompts(model, options.requests, options.prompt))
    ]
    demand = options.requests * -(-(options.prompt + options.output - 1) // BLOCK_SIZE)
    pool = int(options.share * demand)
    print(f"{options.requests} × ({options.prompt} + {options.output}) tokens, demand {demand} blocks, pool {pool}")
    print(
        "memory     seconds  slowdown  preemptions (most of one)  recomputed ÷ useful  blocks out, in  outputs changed"
    )
    roomy_s, expected = 0.0, []
    for name, num_blocks, mode in (
        ("roomy", demand + options.requests, PreemptionMode.AUTO),
        ("recompute", pool, PreemptionMode.RECOMPUTE),
        ("swap", pool, PreemptionMode.SWAP),
        ("auto", pool, PreemptionMode.AUTO),
    ):
        seconds, stats, outputs, most = run(model, commands, num_blocks, demand, mode)
        roomy_s, expected = roomy_s or seconds, expected or outputs
        ratio = stats.num_recomputed_tokens / (stats.num_scheduled_tokens - stats.num_recomputed_tokens)
        changed = sum(output != other for output, other in zip(outputs, expected, strict=True))
        print(
            f"{name:9}  {seconds:7.1f}  {seconds / roomy_s:8.2f}  {stats.num_preemptions:11} ({most})  {ratio:25.1%}  "
            f"{stats.num_swapped_out_blocks:6}, {stats.num_swapped_in_blocks:<6}  {changed}",
            flush=True,
        )


if __name__ == "__main__":
    main()
