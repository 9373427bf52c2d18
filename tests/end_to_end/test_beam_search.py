"""Beam search on the embedded model returns what transformers' beam search returns, whatever the memory does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from embedded_model import embedded_model_config
from inline_engine import InlineEngine
from transformers import AutoModelForCausalLM

from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.config import CacheConfig, Dtype, SchedulerConfig
from octavo.protocol.engine_messages import AddRequest, BeamSearchParams, EarlyStopping
from octavo.protocol.sampling_params import SamplingParams

pytestmark = pytest.mark.model

PROMPTS = (
    "The capital of France is",
    "Q: What is the tallest mountain?\nA:",
)
SEARCHES = (  # beams, choices, length penalty, early stopping, output tokens
    (4, 4, 1.0, EarlyStopping.HEURISTIC, 12),
    (6, 3, 0.5, EarlyStopping.ALWAYS, 8),
    (3, 2, 2.0, EarlyStopping.NEVER, 10),
)
EARLY_STOPPING = {EarlyStopping.ALWAYS: True, EarlyStopping.HEURISTIC: False, EarlyStopping.NEVER: "never"}
ENDS = (".", "\n", " the")  # frequent tokens that end a beam, so that beams of several lengths compete


@pytest.fixture(scope="module")
def token_ids(smollm2_directory: Path) -> tuple[list[list[int]], tuple[int, ...]]:
    tokenizer = Tokenizer.load(str(smollm2_directory))
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    ends = tuple(tokenizer.encode(end)[0] for end in ENDS)
    tokenizer.close()
    return prompts, ends


@pytest.fixture(scope="module")
def reference(
    smollm2_gguf: Path, token_ids: tuple[list[list[int]], tuple[int, ...]]
) -> list[list[tuple[list[int], float]]]:
    """Beams and scores by transformers in float32: for each search and prompt."""
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    prompts, ends = token_ids
    found = []
    for num_beams, num_choices, length_penalty, early_stopping, max_tokens in SEARCHES:
        for prompt in prompts:
            output = model.generate(
                torch.tensor([prompt]),
                num_beams=num_beams,
                num_return_sequences=num_choices,
                length_penalty=length_penalty,
                early_stopping=EARLY_STOPPING[early_stopping],
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=list(ends),
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            sequences = [cut(row[len(prompt) :].tolist(), ends) for row in output.sequences]
            found.append(list(zip(sequences, output.sequences_scores.tolist(), strict=True)))
    return found


def cut(output: list[int], ends: tuple[int, ...]) -> list[int]:
    """Without the padding after the token that ended it."""
    end = next((index for index, token_id in enumerate(output) if token_id in ends), len(output))
    return output[: end + 1]


@pytest.mark.parametrize("num_device_blocks", [1024, 22], ids=["roomy", "tight"])
def test_beams_are_those_of_transformers(
    smollm2_directory: Path,
    smollm2_gguf: Path,
    token_ids: tuple[list[list[int]], tuple[int, ...]],
    reference: list[list[tuple[list[int], float]]],
    num_device_blocks: int,
) -> None:
    prompts, ends = token_ids
    config = embedded_model_config(
        smollm2_directory,
        smollm2_gguf,
        cache=CacheConfig(block_size=4, num_device_blocks=num_device_blocks, num_host_blocks=16),
        scheduler=SchedulerConfig(max_num_seqs=16),
        max_model_len=128,
        dtype=Dtype.FLOAT32,
    )
    commands = [
        AddRequest(
            f"{search}-{index}",
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=ends, ignore_eos=True),
            float(search),
            beam_search=BeamSearchParams(num_beams, num_choices, length_penalty, early_stopping),
        )
        for search, (num_beams, num_choices, length_penalty, early_stopping, max_tokens) in enumerate(SEARCHES)
        for index, prompt in enumerate(prompts)
    ]
    engine = InlineEngine(config)
    answers = engine.run(commands)
    for answer, beams in zip(answers, reference, strict=True):
        assert [beam.token_ids for beam in answer.beams] == [output for output, _ in beams]
        assert [beam.score for beam in answer.beams] == pytest.approx([score for _, score in beams], abs=1e-4)
    assert (engine.core.stats().num_preemptions > 0) == (num_device_blocks == 22)
