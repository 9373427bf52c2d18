"""Logprobs that clients get, of chats and completions, of prompts and outputs, are those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import transformers
from smollm2_reference import all_logprobs, load_reference

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
CONTEXT_LENGTH = 512
TOLERANCE = 2e-3
NUM_LISTED = 3
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0.7, "seed": 5}
EXTRAS = {"return_token_ids": True, "return_tokens_as_token_ids": True, "prompt_logprobs": NUM_LISTED}
QUESTION: Any = [{"role": "user", "content": "Write an emoji and a Chinese word."}]
PROMPT = "Zürich and 東京 are"
Scores = dict[int, float]  # token id -> logprob


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> transformers.LlamaForCausalLM:
    return load_reference(smollm2_gguf)


def id_of(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def check(found: Sequence[Scores | None], own_ids: Sequence[int], expected: np.ndarray, num_listed: int) -> None:
    """Each place has its own token and the likeliest ones, with their logprobs.

    Args:
        expected: fp32 [tokens, vocab_size], what the token before each place says of it.
    """
    assert len(found) == len(own_ids) == len(expected)
    for scores, own_id, row in zip(found, own_ids, expected, strict=True):
        assert scores is not None
        likeliest = np.argsort(row)[::-1][:num_listed].tolist()
        assert own_id in scores
        assert len({own_id, *likeliest}) == len(scores)
        least = row[likeliest[-1]] if likeliest else row[own_id]
        for token_id, logprob in scores.items():
            assert logprob == pytest.approx(row[token_id], abs=TOLERANCE)
            assert token_id == own_id or row[token_id] >= least - TOLERANCE


def listed(prompt_logprobs: list[dict[str, Any] | None]) -> list[Scores | None]:
    return [
        None if place is None else {int(key): entry["logprob"] for key, entry in place.items()}
        for place in prompt_logprobs
    ]


def named(place: dict[str, float]) -> Scores:
    return {id_of(name): logprob for name, logprob in place.items()}


async def test_of_a_chat(embedded_client: openai.AsyncOpenAI, reference: transformers.LlamaForCausalLM) -> None:
    answer = await embedded_client.chat.completions.create(
        **FIELDS, messages=QUESTION, logprobs=True, top_logprobs=NUM_LISTED, extra_body=EXTRAS
    )
    body = answer.model_dump()
    prompt, (choice,) = body["prompt_token_ids"], body["choices"]
    expected = all_logprobs(reference, prompt + choice["token_ids"])
    first, *rest = listed(body["prompt_logprobs"])
    assert first is None
    check(rest, prompt[1:], expected[: len(prompt) - 1], NUM_LISTED)
    entries = choice["logprobs"]["content"]
    output = [id_of(entry["token"]) for entry in entries]
    assert output == choice["token_ids"][: len(output)]
    assert len(output) >= len(choice["token_ids"]) - 1  # the EOS of a chat has no entry
    scores = [named({each["token"]: each["logprob"] for each in (entry, *entry["top_logprobs"])}) for entry in entries]
    check(scores, output, expected[len(prompt) - 1 :][: len(output)], NUM_LISTED)


async def test_of_a_completion(embedded_client: openai.AsyncOpenAI, reference: transformers.LlamaForCausalLM) -> None:
    answer = await embedded_client.completions.create(**FIELDS, prompt=PROMPT, logprobs=NUM_LISTED, extra_body=EXTRAS)
    (choice,) = answer.model_dump()["choices"]
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    expected = all_logprobs(reference, prompt + output)
    _, *rest = listed(choice["prompt_logprobs"])
    check(rest, prompt[1:], expected[: len(prompt) - 1], NUM_LISTED)
    logprobs = choice["logprobs"]
    assert [*map(id_of, logprobs["tokens"])] == output
    check([*map(named, logprobs["top_logprobs"])], output, expected[len(prompt) - 1 : -1], NUM_LISTED)
    own = [named(place)[token_id] for place, token_id in zip(logprobs["top_logprobs"], output, strict=True)]
    assert own == logprobs["token_logprobs"]


async def test_of_a_prompt_that_fills_the_context(
    embedded_client: openai.AsyncOpenAI, reference: transformers.LlamaForCausalLM
) -> None:
    prompt = [3 + 7 * place % 40000 for place in range(CONTEXT_LENGTH)]
    fields = {**FIELDS, "max_tokens": 0, "prompt": prompt, "echo": True, "logprobs": 0}
    answer = await embedded_client.completions.create(**fields, extra_body={"return_tokens_as_token_ids": True})
    (choice,) = answer.model_dump()["choices"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (CONTEXT_LENGTH, 0)
    first, *rest = choice["logprobs"]["top_logprobs"]
    assert first is None
    check([*map(named, rest)], prompt[1:], all_logprobs(reference, prompt)[:-1], 0)
