"""What one step costs the scheduler: schedule + update with N decoding requests, without workers.

    python tests/bench/scheduler_cost.py [--requests 64,256,1024] [--prompt 512] [--steps 400] [--in-flight 2]

vLLM 0.32 needs 11 to 13 µs per request and step for the same (0.74 / 2.90 / 13.4 ms with 64 / 256 / 1,024 requests on
two cores of a shared machine).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from octavo.engine_core.kv_cache_manager import KVCacheManager
from octavo.engine_core.scheduler import Scheduler
from octavo.protocol.codec import encode
from octavo.protocol.config import ModelConfig, SchedulerConfig, WeightsFormat
from octavo.protocol.engine_messages import AddRequest, EngineOutput
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput

BLOCK_SIZE = 16
WARM_UP_STEPS = 20


def build(num_requests: int, num_prompt_tokens: int, num_steps: int, max_steps_in_flight: int) -> Scheduler:
    """A scheduler whose requests have all been admitted and decode from the next step on."""
    max_model_len = num_prompt_tokens + num_steps + WARM_UP_STEPS + 16
    model = ModelConfig(
        path="-",
        weights_path="-",
        weights_format=WeightsFormat.SAFETENSORS,
        served_model_names=("bench",),
        max_model_len=max_model_len,
        vocab_size=50_000,
        eos_token_ids=(49_999,),
    )
    config = SchedulerConfig(
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_requests * num_prompt_tokens,
        max_steps_in_flight=max_steps_in_flight,
    )
    num_blocks = num_requests * (max_model_len // BLOCK_SIZE + 2)
    scheduler = Scheduler(model, config, KVCacheManager(num_blocks, BLOCK_SIZE))
    numbers = random.Random(1)
    for i in range(num_requests):
        prompt = [numbers.randrange(40_000) for _ in range(num_prompt_tokens + i % BLOCK_SIZE)]
        scheduler.add(AddRequest(f"{i:032x}", prompt, SamplingParams(max_tokens=max_model_len), float(i)))
    return scheduler


def result_of(step: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(step.step_id, {request_id: [7] for request_id in step.num_scheduled_tokens})


def measure(num_requests: int, num_prompt_tokens: int, num_steps: int, max_steps_in_flight: int) -> dict[str, float]:
    """Median milliseconds per step of each part."""
    scheduler = build(num_requests, num_prompt_tokens, num_steps, max_steps_in_flight)
    while len(scheduler.running) < num_requests:
        scheduler.update(result_of(scheduler.schedule()))
    steps = [scheduler.schedule() for _ in range(max_steps_in_flight - 1)]
    parts: dict[str, list[float]] = {"schedule": [], "update": [], "encode step": [], "encode outputs": []}
    for _ in range(num_steps):
        times = [time.perf_counter()]
        steps.append(scheduler.schedule())
        times.append(time.perf_counter())
        frame = encode(steps[-1])
        times.append(time.perf_counter())
        result = result_of(steps.pop(0))
        times.append(time.perf_counter())
        outputs = scheduler.update(result)
        times.append(time.perf_counter())
        frame += encode(EngineOutput(outputs, scheduler.stats()))
        times.append(time.perf_counter())
        for name, index in (("schedule", 0), ("encode step", 1), ("update", 3), ("encode outputs", 4)):
            parts[name].append((times[index + 1] - times[index]) * 1e3)
    return {name: statistics.median(values[WARM_UP_STEPS:]) for name, values in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="64,256,1024")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--in-flight", type=int, default=2, choices=(1, 2))
    options = parser.parse_args()
    print("requests  schedule  update    sum ms/step  µs/request  + encode step, outputs ms")
    for num_requests in map(int, options.requests.split(",")):
        parts = measure(num_requests, options.prompt, options.steps, options.in_flight)
        total = parts["schedule"] + parts["update"]
        print(
            f"{num_requests:8}  {parts['schedule']:8.3f}  {parts['update']:6.3f}  {total:13.3f}  "
            f"{total * 1e3 / num_requests:10.2f}  {parts['encode step']:.3f}, {parts['encode outputs']:.3f}"
        )


if __name__ == "__main__":
    main()
