"""Captured graphs against the same steps operation by operation: with `--deterministic`, to the token."""

from __future__ import annotations

import gc

from gpu_part import Options, Report, run_part
from gpu_runner import Model, build_runner, checked_model, engine_config, random_tokens
from step_driver import StepDriver

NUM_REQUESTS = 21  # between two sizes of graphs, so that there is padding
NUM_TINY_REQUESTS = 5
CHUNK = 64


def outputs_of(
    model: Model, options: Options, num_tokens: int, is_eager: bool, is_deterministic: bool
) -> dict[str, list[int]]:
    config = engine_config(model, options.device, enforce_eager=is_eager, deterministic=is_deterministic)
    runner, _ = build_runner(model, config)
    driver = StepDriver(runner, uses_steady=True)
    for index in range(NUM_TINY_REQUESTS if options.is_tiny else NUM_REQUESTS):
        driver.add(f"r{index}", random_tokens(model, 3 + 5 * index, index), temperature=index % 2 * 0.8, seed=index)
    outputs = driver.run_until(num_tokens, CHUNK)
    del driver, runner
    gc.collect()
    return outputs


def main(options: Options, report: Report) -> None:
    model, num_tokens = checked_model(options), 6 if options.is_tiny else 64
    for is_deterministic in (True, False):
        eager = outputs_of(model, options, num_tokens, is_eager=True, is_deterministic=is_deterministic)
        captured = outputs_of(model, options, num_tokens, is_eager=False, is_deterministic=is_deterministic)
        num_same = sum(captured[name] == output for name, output in eager.items())
        name = "graph against eager" + (", deterministic" if is_deterministic else "")
        text = f"{num_same} of {len(eager)} outputs of {num_tokens} tokens are the same"
        report.add(name, text, num_same == len(eager) if is_deterministic else None)


if __name__ == "__main__":
    run_part(main)
