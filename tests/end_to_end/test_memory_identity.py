"""The embedded model gives the same tokens however memory is managed: shared, forked, swapped, recomputed."""

from __future__ import annotations

from pathlib import Path

import pytest
from embedded_model import embedded_model_config
from inline_engine import InlineEngine

from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.config import (
    CacheConfig,
    Dtype,
    PreemptionMode,
    SchedulerConfig,
)
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.model

NUM_OUTPUT_TOKENS = 14
PREFIX = "You are a helpful assistant who answers in one short sentence. "
QUESTIONS = ("Where is Paris?", "What is two plus two?", "Who wrote Hamlet?", "Why is the sky blue?")
CONFIGS = {  # chunk, prefix cache, block size, tokens on device and host, what a preemption does, steps in flight
    "plain": (None, False, 16, 2048, 0, PreemptionMode.RECOMPUTE, 1),
    "cached, small blocks": (7, True, 2, 2048, 0, PreemptionMode.RECOMPUTE, 2),
    "swapped": (64, True, 2, 76, 400, PreemptionMode.SWAP, 2),
    "swapped without cache": (64, False, 4, 100, 400, PreemptionMode.SWAP, 1),
    "recomputed": (None, True, 1, 76, 0, PreemptionMode.RECOMPUTE, 2),
    "recomputed without cache": (7, False, 2, 130, 0, PreemptionMode.RECOMPUTE, 2),
}


@pytest.fixture(scope="module")
def commands(smollm2_directory: Path) -> list[AddRequest]:
    """Four questions with one beginning; the first is also asked for two more choices."""
    tokenizer = Tokenizer.load(str(smollm2_directory))
    prompts = [tokenizer.encode(PREFIX + question) for question in QUESTIONS]
    tokenizer.close()
    params = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.8, seed=11, ignore_eos=True)
    greedy = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    asked = [AddRequest(f"q{i}", prompt, greedy, float(i)) for i, prompt in enumerate(prompts)]
    choices = [
        AddRequest(f"c{i}", prompts[0], SamplingParams(**{**as_dict(params), "choice_index": i}), 0.5, fork_of="q0")
        for i in range(2)
    ]
    return asked + choices


def as_dict(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def run(
    smollm2_directory: Path, smollm2_gguf: Path, commands: list[AddRequest], name: str
) -> tuple[list[list[int]], InlineEngine]:
    chunk, enable_prefix_caching, block_size, num_tokens, num_host_tokens, preemption_mode, max_steps = CONFIGS[name]
    config = embedded_model_config(
        smollm2_directory,
        smollm2_gguf,
        cache=CacheConfig(
            block_size=block_size,
            num_device_blocks=num_tokens // block_size,
            num_host_blocks=num_host_tokens // block_size,
            enable_prefix_caching=enable_prefix_caching,
            check_swapped_blocks=True,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_tokens_per_request=chunk,
            max_steps_in_flight=max_steps,
            preemption_mode=preemption_mode,
        ),
        max_model_len=64,
        dtype=Dtype.FLOAT32,
    )
    engine = InlineEngine(config)
    return [end.token_ids for end in engine.run(commands)], engine


@pytest.fixture(scope="module")
def plain(smollm2_directory: Path, smollm2_gguf: Path, commands: list[AddRequest]) -> list[list[int]]:
    return run(smollm2_directory, smollm2_gguf, commands, "plain")[0]


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "plain"])
def test_memory_does_not_change_a_token(
    smollm2_directory: Path, smollm2_gguf: Path, commands: list[AddRequest], plain: list[list[int]], name: str
) -> None:
    outputs, engine = run(smollm2_directory, smollm2_gguf, commands, name)
    stats = engine.core.stats()
    assert outputs == plain
    assert len({tuple(output) for output in outputs}) == len(commands), "every answer is its own"
    assert (stats.num_preemptions > 0) == (name != "cached, small blocks")
    assert (stats.num_swapped_in_blocks > 0) == name.startswith("swapped")
    assert (stats.num_cached_tokens > 0) >= CONFIGS[name][1]
