"""What the scheduler costs: add a request, schedule + update with N decoding requests; without workers and sockets.

    python tests/bench/scheduler.py [--n 64,256,1024] [--prompt 512] [--steps 200] [--in-flight 1] [--no-prefix-cache]
                                    [--json FILE] [--against FILE]

All requests decode; each result samples one token per request. The times are medians. `--against` takes the figures of
another scheduler (a JSON file with `rows` of n, prefix_cache, total_ms and add_request_us) and prints the ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path

from octavo.engine_core.scheduler import Scheduler
from octavo.engine_core.server import calm_collector
from octavo.protocol.codec import encode
from octavo.protocol.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, WeightsFormat
from octavo.protocol.engine_messages import AddRequest, EngineOutput
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import ModelRunnerOutput, WorkerReady

BLOCK_SIZE = 16
WARM_UP_STEPS = 20
VOCAB_SIZE = 32_000
MAX_MODEL_LEN = 8192

Row = dict[str, float | int | bool]


def build(num_requests: int, options: argparse.Namespace) -> Scheduler:
    """A scheduler with a quarter more memory than the requests will need: nobody is preempted."""
    num_tokens = options.prompt + options.steps + WARM_UP_STEPS + 64
    model = ModelConfig(
        path="-",
        weights_path="-",
        weights_format=WeightsFormat.SAFETENSORS,
        served_model_names=("bench",),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
    )
    config = EngineConfig(
        model=model,
        ipc_directory="-",
        cache=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=not options.no_prefix_cache),
        scheduler=SchedulerConfig(
            max_num_seqs=num_requests,
            max_num_batched_tokens=max(8192, num_requests),
            max_steps_in_flight=options.in_flight,
        ),
    )
    num_blocks = int(num_requests * -(-num_tokens // BLOCK_SIZE) * 1.25) + 64
    return Scheduler(config, WorkerReady(0, num_blocks))


def add_requests(scheduler: Scheduler, num_requests: int, num_prompt_tokens: int) -> float:
    """Add them; return the mean microseconds of each."""
    numbers = random.Random(1)
    params = SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True, temperature=0.0)
    commands = [
        AddRequest(f"{i:032x}", [numbers.randrange(3, VOCAB_SIZE) for _ in range(num_prompt_tokens)], params, float(i))
        for i in range(num_requests)
    ]
    start = time.perf_counter()
    for command in commands:
        scheduler.add(command)
    return (time.perf_counter() - start) / num_requests * 1e6


def sample(scheduler: Scheduler, numbers: random.Random) -> ModelRunnerOutput:
    """A result for the step that was scheduled last."""
    plan = scheduler.steps_in_flight[-1]
    return ModelRunnerOutput(plan.step_id, [numbers.randrange(3, VOCAB_SIZE) for _ in plan.sampling])


def measure(num_requests: int, options: argparse.Namespace) -> Row:
    scheduler, numbers = build(num_requests, options), random.Random(2)
    add_request_us = add_requests(scheduler, num_requests, options.prompt)
    prefill_ms = []
    while len(scheduler.steady) + len(scheduler._caught_up) < num_requests:
        start = time.perf_counter()
        scheduler.schedule()
        prefill_ms.append((time.perf_counter() - start) * 1e3)
        scheduler.update(sample(scheduler, numbers))
    gc.collect()
    gc.freeze()  # what stays does not have to be looked at by every collection
    times: dict[str, list[float]] = {"schedule": [], "update": [], "total": [], "encode_step": [], "encode_outputs": []}
    results = []
    for index in range(WARM_UP_STEPS + options.steps):
        start = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        frame = encode(step)
        encoded = time.perf_counter()
        results.append(sample(scheduler, numbers))
        if len(results) < options.in_flight:
            continue
        result = results.pop(0)
        arrived = time.perf_counter()
        outputs = scheduler.update(result)
        updated = time.perf_counter()
        output_frame = encode(EngineOutput(outputs, scheduler.stats()))
        sent = time.perf_counter()
        if index >= WARM_UP_STEPS:
            times["schedule"].append(scheduled - start)
            times["update"].append(updated - arrived)
            times["total"].append(scheduled - start + updated - arrived)
            times["encode_step"].append(encoded - scheduled)
            times["encode_outputs"].append(sent - updated)
    gc.unfreeze()
    medians = {f"{name}_ms": round(statistics.median(values) * 1e3, 4) for name, values in times.items()}
    return {
        "n": num_requests,
        "prefix_cache": not options.no_prefix_cache,
        "add_request_us": round(add_request_us, 1),
        "prefill_ms_per_step": round(statistics.mean(prefill_ms), 3),
        **medians,
        "us_per_request": round(medians["total_ms"] / num_requests * 1e3, 3),
        "step_bytes": len(frame),
        "outputs_bytes": len(output_frame),
    }


def print_row(row: Row, others: list[Row]) -> None:
    other = next((o for o in others if o["n"] == row["n"] and o["prefix_cache"] == row["prefix_cache"]), None)
    ratio = ""
    if other is not None:
        ratio = (
            f"  1/{other['total_ms'] / row['total_ms']:.1f} of {other['total_ms']} ms,"
            f" add 1/{other['add_request_us'] / row['add_request_us']:.1f} of {other['add_request_us']} µs"
        )
    print(
        f"{row['n']:8}  {row['schedule_ms']:8.3f}  {row['update_ms']:6.3f}  {row['total_ms']:8.3f}  "
        f"{row['us_per_request']:10.3f}  {row['add_request_us']:14.1f}  "
        f"{row['encode_step_ms']:.3f} + {row['encode_outputs_ms']:.3f}{ratio}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", default="64,256,1024", help="numbers of decoding requests")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--in-flight", type=int, default=1, choices=(1, 2))
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--against", type=Path, help="figures to compare with")
    options = parser.parse_args()
    calm_collector()  # as the engine core's process does at its start
    others = json.loads(options.against.read_text())["rows"] if options.against else []
    print("requests  schedule  update  total ms  µs/request  µs/add_request  ms to encode step + outputs")
    rows = []
    for num_requests in map(int, options.n.split(",")):
        rows.append(measure(num_requests, options))
        print_row(rows[-1], others)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
