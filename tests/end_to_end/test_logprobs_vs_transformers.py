"""Raw logprobs of the default model, of prompts and outputs, are those of transformers, whatever edits the logits."""

from __future__ import annotations

import numpy as np
import pytest
import transformers
from embedded_model import embedded_model_config
from inline_engine import InlineEngine
from smollm2_reference import all_logprobs, encode_prompts, load_reference

from octavo.protocol.config import CacheConfig, Dtype, SchedulerConfig
from octavo.protocol.engine_messages import AddRequest, RequestOutput
from octavo.protocol.logprobs import TokenLogprobs
from octavo.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.model
TOLERANCE = 2e-3
NUM_LISTED = 5
OPTIONS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 4, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": ((28, 4.0),), "bad_words": ((198, 198),)},
)


@pytest.fixture(scope="module")
def answers(smollm2_gguf, smollm2_directory) -> list[tuple[AddRequest, RequestOutput]]:
    """Three requests that run together, in chunks."""
    engine = InlineEngine(
        embedded_model_config(
            smollm2_directory,
            smollm2_gguf,
            CacheConfig(num_device_blocks=64),
            SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_tokens_per_request=9),
            max_model_len=128,
            dtype=Dtype.FLOAT32,
        )
    )
    commands = [
        AddRequest(
            f"r{index}",
            prompt,
            SamplingParams(max_tokens=16, num_logprobs=NUM_LISTED, num_prompt_logprobs=NUM_LISTED, **options),
            float(index),
        )
        for index, (prompt, options) in enumerate(zip(encode_prompts(smollm2_directory), OPTIONS, strict=True))
    ]
    return list(zip(commands, engine.run(commands), strict=True))


@pytest.fixture(scope="module")
def reference(smollm2_gguf) -> transformers.LlamaForCausalLM:
    return load_reference(smollm2_gguf)


def check(rows: TokenLogprobs, token_ids: list[int], expected: np.ndarray) -> float:
    """Compare; return the largest difference."""
    assert rows.num_rows == len(token_ids) == len(expected)
    largest = 0.0
    for token_id, row, (ids, values) in zip(token_ids, expected, rows.rows(), strict=True):
        assert (ids[0], len(ids)) == (token_id, 1 + NUM_LISTED)
        assert ids[1] == row.argmax()
        assert values[1:] == sorted(values[1:], reverse=True)
        largest = max(largest, float(np.abs(row[ids] - values).max()))
    assert largest <= TOLERANCE
    return largest


def test_they_are_those_of_transformers(answers, reference, show_at_the_end):
    largest = []
    for command, answer in answers:
        prompt, output = command.prompt_token_ids, answer.token_ids
        expected = all_logprobs(reference, prompt + output)
        assert answer.logprobs is not None
        assert answer.prompt_logprobs is not None
        assert answer.prompt_logprobs.first_position == 1
        largest.append(check(answer.prompt_logprobs.rows, prompt[1:], expected[: len(prompt) - 1]))
        largest.append(check(answer.logprobs, output, expected[len(prompt) - 1 : -1]))
    show_at_the_end("Largest difference of logprobs to transformers", f"{max(largest):.1e}")
