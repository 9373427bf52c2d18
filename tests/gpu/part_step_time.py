"""Steps of a model with the shapes of an 8B one and random weights: time, what of it is the host's, tokens a second.

Requests begin with their context computed (the cache is random), so that only decode steps run. They run once with two
steps in flight, as in service, and once one at a time; what the host needs per step is hidden where the former takes
less than the latter by that much.
"""

from __future__ import annotations

import time
from collections import deque

from gpu_part import Options, Report, run_part
from gpu_runner import LLAMA_8B, TINY, build_runner, engine_config, made_up_model

from octavo.protocol.config import CacheConfig
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import NewRequest, SchedulerOutput
from octavo.worker.model_runner import ModelRunner
from octavo.worker.step_result import PendingStep

BATCH_SIZES = (1, 8, 64, 256)
CONTEXT, NUM_STEPS, NUM_WARM_STEPS = 1024, 40, 5


class Steps:
    """Decode steps of a batch, numbered on."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.step_id = 0
        self.requests: list[str] = []

    def launch(self, new: list[NewRequest], joined: list[str], dropped: list[str]) -> PendingStep:
        step = SchedulerOutput(self.step_id, dropped, [], new, [], [], joined, {})
        self.step_id += 1
        return self.runner.launch(step)

    def begin(self, batch_size: int, context: int, num_steps: int) -> None:
        """Let `batch_size` requests start whose first `context` tokens are computed, with blocks for all steps."""
        blocks_each = -(-(context + num_steps + 2) // self.runner.block_size)
        dropped, self.requests = self.requests, [f"{batch_size}-{index}" for index in range(batch_size)]
        new = [
            NewRequest(
                name,
                [1] * (context + 1),
                [],
                SamplingParams(max_tokens=num_steps + 2, temperature=0.8, top_p=0.95, seed=index),
                list(range(index * blocks_each, (index + 1) * blocks_each)),
                context,
            )
            for index, name in enumerate(self.requests)
        ]
        self.launch(new, self.requests, dropped).result()

    def run(self, num_steps: int, max_in_flight: int) -> tuple[float, float]:
        """Seconds per step, and of them those that the host spends to launch one."""
        pending: deque[PendingStep] = deque()
        launching_s = 0.0
        started_s = time.perf_counter()
        for _ in range(num_steps):
            before_s = time.perf_counter()
            pending.append(self.launch([], [], []))
            launching_s += time.perf_counter() - before_s
            if len(pending) == max_in_flight:
                pending.popleft().result()
        for step in pending:
            step.result()
        return (time.perf_counter() - started_s) / num_steps, launching_s / num_steps


def main(options: Options, report: Report) -> None:
    model = made_up_model(TINY if options.is_tiny else LLAMA_8B)
    batch_sizes, context = ((1, 3), 20) if options.is_tiny else (BATCH_SIZES, CONTEXT)
    num_steps, num_warm = (3, 1) if options.is_tiny else (NUM_STEPS, NUM_WARM_STEPS)
    num_blocks = max(batch_sizes) * -(-(context + 2 * (num_steps + num_warm) + 2) // 16)
    config = engine_config(
        model,
        options.device,
        max_model_len=max(512, 2 * context),
        max_num_seqs=max(batch_sizes),
        max_num_batched_tokens=max(2048, *batch_sizes) if not options.is_tiny else 64,
        cache=CacheConfig(num_device_blocks=num_blocks),
    )
    started_s = time.monotonic()
    runner, ready = build_runner(model, config)
    report.add("start of the worker, without reading weights", f"{time.monotonic() - started_s:.1f} s")
    report.add("prefill", f"{ready.prefill_tokens_per_s:.0f} tokens/s")
    runner.kv_cache.normal_()
    steps = Steps(runner)
    for batch_size in batch_sizes:
        steps.begin(batch_size, context, 2 * (num_steps + num_warm))
        steps.run(num_warm, 2)
        step_s, host_s = steps.run(num_steps, 2)
        steps.run(num_warm, 1)
        alone_s, _ = steps.run(num_steps, 1)
        is_hidden = step_s > host_s * 1.05 and alone_s - step_s > host_s / 2
        report.add(
            f"step of {batch_size}, context {context}",
            f"{step_s * 1e3:.2f} ms, host {host_s * 1e3:.2f} ms ({'' if is_hidden else 'not '}hidden), "
            f"{alone_s * 1e3:.2f} ms one at a time, {batch_size / step_s:.0f} tokens/s",
        )


if __name__ == "__main__":
    run_part(main)
