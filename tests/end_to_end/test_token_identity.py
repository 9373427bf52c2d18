"""The embedded model gives the tokens that transformers gives, whatever the chunk, the block size and the company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from embedded_model import embedded_model_config
from inline_engine import InlineEngine
from transformers import AutoModelForCausalLM

from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.config import CacheConfig, Dtype, SchedulerConfig
from octavo.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.model

NUM_OUTPUT_TOKENS = 24
NUM_OUTPUT_TOKENS_ALONE = 8
NUM_AT_ONCE = 16
NUM_SLOTS = 8192
PROMPTS = (
    "The",
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "In 1969 the first human being",
    "Once upon a time there was a small red fox who lived near the",
    "1, 2, 3, 4, 5, 6,",
    "To make bread one needs flour, water, salt and",
    "The three laws of motion, in the words of Newton, say that",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "Translate to Spanish: good morning.",
    "SELECT name, age FROM people WHERE",
    "The mitochondria is the",
    "Q: Which planet is the largest?\nA:",
    "My favourite season is autumn, since " * 4,
    "<html><body><h1>Welcome</h1><p>",
    "A short history of the printing press. " * 8,
    "Roses are red, violets are blue,",
    "Ünïcödé wörks töö: çà et là, naïve café – ",
    "List the primes below 100: 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, " * 3,
)


@pytest.fixture(scope="module")
def prompts(smollm2_directory: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(str(smollm2_directory))
    token_ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    tokenizer.close()
    return token_ids


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by transformers in float32, each prompt alone."""
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    continuations = []
    with torch.inference_mode():
        for prompt in prompts:
            output = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=NUM_OUTPUT_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            continuations.append(output[0, len(prompt) :].tolist())
    return continuations


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("max_tokens_per_request", [7, 64, None], ids=lambda chunk: f"chunk-{chunk}")
@pytest.mark.parametrize("block_size", [1, 16, 32], ids=lambda size: f"block-{size}")
def test_tokens_are_those_of_transformers(
    smollm2_directory: Path,
    smollm2_gguf: Path,
    prompts: list[list[int]],
    reference: list[list[int]],
    block_size: int,
    max_tokens_per_request: int | None,
) -> None:
    config = embedded_model_config(
        smollm2_directory,
        smollm2_gguf,
        cache=CacheConfig(block_size=block_size, num_device_blocks=NUM_SLOTS // block_size),
        scheduler=SchedulerConfig(max_num_seqs=NUM_AT_ONCE, max_tokens_per_request=max_tokens_per_request),
        max_model_len=512,
        dtype=Dtype.FLOAT32,
    )
    engine = InlineEngine(config)
    at_once = engine.generate(prompts, [greedy(NUM_OUTPUT_TOKENS)] * len(prompts))
    assert [output for output, _ in at_once] == reference
    alone = [engine.generate([prompt], [greedy(NUM_OUTPUT_TOKENS_ALONE)])[0][0] for prompt in prompts]
    assert alone == [output[:NUM_OUTPUT_TOKENS_ALONE] for output in reference]
