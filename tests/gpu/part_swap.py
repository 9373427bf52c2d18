"""Blocks go to the host and come back elsewhere, bit for bit, and the request goes on as if nothing had been."""

from __future__ import annotations

import torch
from gpu_part import Options, Report, run_part
from gpu_runner import build_runner, checked_model, engine_config, random_tokens
from step_driver import StepDriver

PROMPT_LENGTH, NUM_TOKENS = 100, 24


def main(options: Options, report: Report) -> None:
    model = checked_model(options)
    runner, ready = build_runner(model, engine_config(model, options.device, deterministic=True))
    prompt = random_tokens(model, PROMPT_LENGTH, 0)
    driver = StepDriver(runner)
    driver.add("undisturbed", prompt)
    expected = driver.run_until(NUM_TOKENS, PROMPT_LENGTH)["undisturbed"]
    driver.drop("undisturbed")

    driver.add("swapped", prompt)
    driver.run_until(NUM_TOKENS // 2, PROMPT_LENGTH)
    blocks = list(driver.requests["swapped"].blocks)
    before = runner.kv_cache[:, :, blocks].cpu()
    driver.swap_out("swapped")
    driver.add("other", random_tokens(model, PROMPT_LENGTH, 1))
    driver.run_until(NUM_TOKENS // 2, PROMPT_LENGTH)
    driver.drop("other")
    runner.kv_cache[:, :, blocks] = torch.nan
    new_blocks = driver.swap_in("swapped")
    driver.step(swapped=1)
    num_full = (PROMPT_LENGTH + NUM_TOKENS // 2 - 1) // runner.block_size  # the step has written to the block behind
    after = runner.kv_cache[:, :, new_blocks[:num_full]].cpu()
    same = torch.equal(before[:, :, :num_full], after)
    report.add("swap round trip", f"{len(blocks)} blocks, the same bits: {same}", same)
    output = driver.run_until(NUM_TOKENS, PROMPT_LENGTH)["swapped"]
    report.add(
        "output after a swap", "the same" if output == expected else f"{output} != {expected}", output == expected
    )
    report.add("blocks copied", f"{ready.copied_blocks_per_s:.0f} a second")


if __name__ == "__main__":
    run_part(main)
