"""With `--deterministic`, a request's logprobs have the same bits alone, in batches of any size, and in chunks."""

from __future__ import annotations

from gpu_part import Options, Report, run_part
from gpu_runner import Model, build_runner, checked_model, engine_config, prompts_for, random_tokens
from step_driver import StepDriver

from octavo.worker.model_runner import ModelRunner

NUM_CANDIDATES = 16
BATCH_SIZES = (2, 5, 16, 40)
CHUNKS = (1, 7, 100)
CONTEXT = 150

Logprobs = list[tuple[list[int], list[float]]]


def logprobs_of(
    runner: ModelRunner, model: Model, prompt: list[int], num_tokens: int, num_others: int = 0, chunk: int = 512
) -> Logprobs:
    """What is likeliest at each position after the prompt, with others in the steps, and the prompt in chunks."""
    driver = StepDriver(runner)
    driver.add("checked", prompt, num_candidates=NUM_CANDIDATES)
    for index in range(num_others):
        driver.add(f"other{index}", random_tokens(model, 1 + 3 * index, index), temperature=1.0, seed=index)
    lists: Logprobs = []
    while len(lists) < num_tokens:
        counts = {name: request.num_tokens - request.num_computed for name, request in driver.requests.items()}
        output = driver.step(**{name: min(count, chunk) for name, count in counts.items()})
        if "checked" in output.candidates:
            candidates = output.candidates["checked"]
            lists.append((candidates.token_ids, candidates.logprobs))
            driver.choose("checked", candidates.token_ids[0])
    for name in list(driver.requests):
        driver.drop(name)
    driver.step()
    return lists


def main(options: Options, report: Report) -> None:
    model, num_tokens = checked_model(options), 4 if options.is_tiny else 24
    runner, _ = build_runner(
        model, engine_config(model, options.device, max_num_batched_tokens=2048, deterministic=True)
    )
    prompt = (prompts_for(model)[1] * CONTEXT)[:CONTEXT]
    alone = logprobs_of(runner, model, prompt, num_tokens)
    batch_sizes, chunks = (BATCH_SIZES[:2], CHUNKS[1:2]) if options.is_tiny else (BATCH_SIZES, CHUNKS)
    for batch_size in batch_sizes:
        same = logprobs_of(runner, model, prompt, num_tokens, num_others=batch_size - 1) == alone
        report.add(f"the same bits in a batch of {batch_size}", str(same), same)
    for chunk in chunks:
        same = logprobs_of(runner, model, prompt, num_tokens, num_others=3, chunk=chunk) == alone
        report.add(f"the same bits in chunks of {chunk}", str(same), same)


if __name__ == "__main__":
    run_part(main)
