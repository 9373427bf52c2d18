"""The model on the device against the model on the CPU in fp32, teacher-forced.

The CPU chooses every token; the device says at each position which one it would have chosen. Where it is another one,
the CPU's own gap between the two says whether that is rounding: a gap of some hundredths of a nat is, in 16 bits.
"""

from __future__ import annotations

import gc
import math

from gpu_part import Options, Report, run_part
from gpu_runner import build_runner, checked_model, engine_config, prompts_for
from step_driver import StepDriver

from octavo.protocol.config import DeviceKind, Dtype
from octavo.protocol.worker_messages import Candidates
from octavo.worker.model_runner import ModelRunner

NUM_CANDIDATES = 16
LARGEST_GAPS = {Dtype.FLOAT32: 1e-3, Dtype.BFLOAT16: 0.25}  # nats

Lists = list[list[Candidates]]


def likeliest_tokens(runner: ModelRunner, prompts: list[list[int]], num_tokens: int, forced: Lists | None) -> Lists:
    """For each prompt and position what is likeliest there, after the likeliest tokens of `forced`, or else its own."""
    driver = StepDriver(runner)
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt, max_tokens=num_tokens, num_candidates=NUM_CANDIDATES)
    lists: Lists = [[] for _ in prompts]
    for position in range(num_tokens):
        output = driver.step(
            **{name: request.num_tokens - request.num_computed for name, request in driver.requests.items()}
        )
        for index, own in enumerate(lists):
            own.append(output.candidates[f"r{index}"])
            leader = own if forced is None else forced[index]
            driver.choose(f"r{index}", leader[position].token_ids[0])
    return lists


def gap_of(expected: Candidates, token_id: int) -> float:
    """How much less likely than the best one a token is; infinite when it is not among the likeliest."""
    if token_id not in expected.token_ids:
        return math.inf
    return expected.logprobs[0] - expected.logprobs[expected.token_ids.index(token_id)]


def compare(expected: Lists, got: Lists) -> tuple[int, int, float, float]:
    """Positions, those with another token, the largest gap at one, and the largest difference of a best logprob."""
    pairs = [pair for lists in zip(expected, got, strict=True) for pair in zip(*lists, strict=True)]
    gaps = [gap_of(one, other.token_ids[0]) for one, other in pairs if one.token_ids[0] != other.token_ids[0]]
    differences = [
        abs(one.logprobs[0] - other.logprobs[other.token_ids.index(one.token_ids[0])])
        for one, other in pairs
        if one.token_ids[0] in other.token_ids
    ]
    return len(pairs), len(gaps), max(gaps, default=0.0), max(differences, default=math.inf)


def main(options: Options, report: Report) -> None:
    model = checked_model(options)
    prompts, num_tokens = prompts_for(model), 8 if options.is_tiny else 48
    runner, _ = build_runner(model, engine_config(model, DeviceKind.CPU, dtype=Dtype.FLOAT32))
    expected = likeliest_tokens(runner, prompts, num_tokens, None)
    del runner  # the kernels of a process are those of the runner that was built last
    gc.collect()
    for dtype, largest_gap in LARGEST_GAPS.items():
        runner, _ = build_runner(model, engine_config(model, options.device, dtype=dtype))
        got = likeliest_tokens(runner, prompts, num_tokens, expected)
        num_positions, num_others, gap, difference = compare(expected, got)
        text = (
            f"{num_others} of {num_positions} tokens differ, gap at most {gap:.4f}, logprobs at most {difference:.4f}"
        )
        report.add(f"{dtype} against fp32 on the CPU", text, gap <= largest_gap)
        del runner
        gc.collect()


if __name__ == "__main__":
    run_part(main)
