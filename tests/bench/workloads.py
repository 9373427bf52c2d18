"""Text for shapes: prompts of an exact number of tokens, which share openings where their shapes say so.

Same shapes, same seed, same tokenizer: same prompts. Prompts that share no block differ from their first words on, so
that a prefix cache finds what the shapes share and nothing else. The text is English, because random bytes cost a
tokenizer and a model other work than users do. Rejected: prompts as token ids, which chat endpoints do not take.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from octavo.simulator.traces import Shape

SENTENCES = Path(__file__).with_name("english.txt").read_text().splitlines()
CHARS_PER_TOKEN = 4.7  # of english.txt with a vocabulary of 49,152; used where no tokenizer is given

Cut = Callable[[str, int], str | None]


@dataclass(frozen=True)
class Request:
    """What a server is asked: text of `num_prompt_tokens`, and to answer with exactly `num_output_tokens`."""

    prompt: str
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float


def cut_by_characters(text: str, num_tokens: int) -> str | None:
    """Return the opening of `text` that is about `num_tokens` long, or None when `text` is too short."""
    num_chars = max(1, round(num_tokens * CHARS_PER_TOKEN))
    return text[:num_chars] if num_chars <= len(text) else None


def cut_by_tokens(tokenizer: Tokenizer, text: str, num_tokens: int) -> str | None:
    """Return the opening of `text` that encodes to exactly `num_tokens`, special tokens included (None: too short).

    A text cut between two of its tokens encodes to the tokens before the cut, in BPE, Unigram and WordPiece alike; that
    is checked. Raises ValueError for a tokenizer of another kind.
    """
    num_special = tokenizer.num_special_tokens_to_add(is_pair=False)
    num_tokens = max(num_tokens, num_special + 1)  # no server takes a prompt without text
    encoding = tokenizer.encode(text, add_special_tokens=False)
    if len(encoding.ids) + num_special < num_tokens:
        return None
    text = text[: encoding.offsets[num_tokens - num_special - 1][1]]
    if (found := len(tokenizer.encode(text).ids)) != num_tokens:
        raise ValueError(f"this tokenizer made {found} tokens of a prompt that should have {num_tokens}")
    return text


def with_tokenizer(path: str | None) -> Cut:
    """Return the function that cuts text to a number of tokens: exact by a tokenizer.json, or else about right."""
    if path is None:
        return cut_by_characters
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return functools.partial(cut_by_tokens, tokenizer)


def english(opening: str, num_tokens: int, rng: random.Random, cut: Cut) -> str:
    """Return `opening` and random sentences behind it, cut to `num_tokens`."""
    text = opening
    while True:
        num_missing_chars = num_tokens * CHARS_PER_TOKEN * 1.2 - len(text)
        text += "".join(f" {rng.choice(SENTENCES)}" for _ in range(max(4, int(num_missing_chars / 60))))
        if (found := cut(text, num_tokens)) is not None:
            return found


def write_prompts(shapes: list[Shape], seed: str, cut: Cut) -> list[Request]:
    """Write a prompt for each shape; `seed` decides the text and nothing else."""

    @functools.cache
    def block(block_id: int, num_tokens: int) -> str:
        name = f"{seed}.{block_id}"
        return english(f"Block {name}.", num_tokens, random.Random(f"block {name}"), cut)

    def prompt(index: int, shape: Shape) -> str:
        opening = [block(block_id, shape.num_block_tokens) for block_id in shape.block_ids]
        own = f"Request {seed}.{index}."
        rng = random.Random(f"request {seed}.{index}")
        return english(" ".join([*opening, own]), shape.num_prompt_tokens, rng, cut)

    return [
        Request(prompt(index, shape), shape.num_prompt_tokens, shape.num_output_tokens, shape.arrival_s)
        for index, shape in enumerate(shapes)
    ]
