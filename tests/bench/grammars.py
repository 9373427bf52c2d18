"""How much one row that follows a JSON schema slows a step of eight rows, on the embedded model.

    PYTHONPATH=tests python tests/bench/grammars.py [--rounds 20] [--output 48] [--rows 8]

The same prompts run with and without the schema in turn, in one process, so that what else the machine does meets both
alike. Printed is the median over the rounds of the ratio of the median times of a decode step; and how long a mask
takes by itself.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from embedded_model import embedded_model_config, locate_embedded_model
from grammar_cases import of_schema
from inline_engine import InlineEngine

from octavo.api_server.tokenizer import Tokenizer
from octavo.kernels.ops.logits_edits import WORD_BITS
from octavo.protocol.config import CacheConfig, SchedulerConfig
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams
from octavo.worker.grammar import Grammars, GrammarState

EOS = 2
ENTRY = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog", "bird"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
GRAMMAR = of_schema({"type": "array", "items": ENTRY, "minItems": 100})


def step_times_s(
    engine: InlineEngine, name: str, prompts: list[list[int]], grammar: str, max_tokens: int
) -> list[float]:
    """Run all prompts, the first with `grammar`; return the times between the ends of steps, but for the first ones."""
    ends_s: list[float] = []
    commands = [
        AddRequest(
            f"{name}-{index}",
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0.0, grammar="" if index else grammar),
            float(index),
        )
        for index, prompt in enumerate(prompts)
    ]
    engine.run(commands, lambda: ends_s.append(time.perf_counter()))
    return [after - before for before, after in itertools.pairwise(ends_s[3:])]


def mask_time_s(path: Path, vocab_size: int, output: Sequence[int]) -> float:
    """Return the median time of a mask behind each beginning of `output`."""
    state = GrammarState(Grammars(path / "tokenizer.json", vocab_size, (EOS,)), GRAMMAR)
    bits, times_s = np.zeros(-(-vocab_size // WORD_BITS), np.int32), []
    for token_id in output:
        started_s = time.perf_counter()
        state.fill(bits)
        times_s.append(time.perf_counter() - started_s)
        state.accept([token_id])
    return statistics.median(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=int, default=48, help="tokens of each output")
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    model = locate_embedded_model()
    # One step in flight: as in a worker on a CPU, a step's tokens are known when the next one comes.
    scheduler = SchedulerConfig(max_num_seqs=options.rows, max_steps_in_flight=1)
    cache = CacheConfig(num_device_blocks=options.rows * 16)
    config = embedded_model_config(model.path, model.weights_path, cache, scheduler, max_model_len=256)
    engine = InlineEngine(config)
    tokenizer = Tokenizer.load(str(model.path))
    prompts = [tokenizer.encode(f"Animal number {index}, as JSON: ") for index in range(options.rows)]
    tokenizer.close()
    step_times_s(engine, "first", prompts, GRAMMAR, options.output)  # which loads the tokenizer
    ratios = []
    for index in range(options.rounds):
        plain_s = statistics.median(step_times_s(engine, f"plain{index}", prompts, "", options.output))
        json_s = statistics.median(step_times_s(engine, f"json{index}", prompts, GRAMMAR, options.output))
        ratios.append(json_s / plain_s)
    quartiles = statistics.quantiles(ratios, n=4)
    mask_us = mask_time_s(model.path, config.model.vocab_size, said_by(engine, prompts[0], options.output)) * 1e6
    print(f"{options.rows} rows, one of which follows a schema ÷ {options.rows} rows: {statistics.median(ratios):.3f}")
    print(f"quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f}; last round {json_s * 1e3:.1f} ÷ {plain_s * 1e3:.1f} ms")
    print(f"a mask takes {mask_us:.0f} µs")


def said_by(engine: InlineEngine, prompt: list[int], max_tokens: int) -> list[int]:
    """Return what the row with the schema says."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, grammar=GRAMMAR)
    (end,) = engine.run([AddRequest("alone", prompt, params, 0.0)])
    return end.token_ids


if __name__ == "__main__":
    main()
