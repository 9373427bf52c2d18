"""Text for shapes: prompts of an exact number of tokens, which share openings where their shapes say so; or a file's.

Same shapes, same seed, same tokenizer: same prompts. Prompts that share no block differ from their first words on, so
that a prefix cache finds what the shapes share and nothing else. The text is English, because random bytes cost a
tokenizer and a model other work than users do. Rejected: prompts as token ids, which chat endpoints do not take.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from tokenizers import Tokenizer

from octavo.api_server.client.shapes import Shape, mixed, poisson_arrivals_s

ENGLISH = Path(__file__).with_name("english.txt")
SENTENCES = ENGLISH.read_text().splitlines()
CHARS_PER_TOKEN = 4.7  # of english.txt with a vocabulary of 49,152; used where no tokenizer is given

Cut = Callable[[str, int], str | None]


@dataclass(frozen=True)
class Request:
    """What a server is asked: text of `num_prompt_tokens`, and to answer with `num_output_tokens`.

    `prompt` may be the messages of a chat. `num_prompt_tokens` is 0 when nobody counted them.
    """

    prompt: str | list[dict[str, Any]]
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
    """Return the function that cuts text to a number of tokens: exact by a tokenizer.json, or else about right.

    Raises ValueError for another file.
    """
    if path is None:
        return cut_by_characters
    try:
        tokenizer = Tokenizer.from_str(Path(path).read_text())
    except Exception as problem:  # of this very type, for every fault of the text
        raise ValueError(f"{path} is no tokenizer.json: {problem}") from problem
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
        return english(f"Block {name}.", num_tokens, random.Random(f"block {name}"), cut)  # noqa: S311 - no secret

    def prompt(index: int, shape: Shape) -> str:
        opening = [block(block_id, shape.num_block_tokens) for block_id in shape.block_ids]
        own = f"Request {seed}.{index}."
        rng = random.Random(f"request {seed}.{index}")  # noqa: S311
        return english(" ".join([*opening, own]), shape.num_prompt_tokens, rng, cut)

    return [
        Request(prompt(index, shape), shape.num_prompt_tokens, shape.num_output_tokens, shape.arrival_s)
        for index, shape in enumerate(shapes)
    ]


class Workload(Protocol):
    """Requests for a server, another text for each seed where the text is ours to choose."""

    @property
    def name(self) -> str: ...

    def requests(self, seed: str) -> list[Request]: ...

    def warm_up(self, seed: str, count: int) -> list[Request]:
        """Return requests to send before, which put nothing of `requests` into a prefix cache."""
        ...


@dataclass(frozen=True)
class ShapedWorkload:
    """Made-up text in given shapes."""

    name: str
    shapes: list[Shape]
    cut: Cut

    def requests(self, seed: str) -> list[Request]:
        return write_prompts(self.shapes, seed, self.cut)

    def warm_up(self, seed: str, count: int) -> list[Request]:
        return write_prompts(self.shapes[:count], f"warm-up {seed}", self.cut)


@dataclass(frozen=True)
class FileWorkload:
    """Somebody's own prompts, the same for every seed."""

    name: str
    prompts: list[Request]

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompts[0].prompt, list)

    def requests(self, seed: str) -> list[Request]:
        return self.prompts

    def warm_up(self, seed: str, count: int) -> list[Request]:
        return write_prompts(mixed(count), f"warm-up {seed}", cut_by_characters)


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a file of prompts: either `prompt` or `messages`."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


def read_prompts(path: Path, limit: int | None, max_tokens: int, rate_per_s: float | None) -> FileWorkload:
    """Read the first `limit` lines of JSON; `max_tokens` is for those that have none. Raises ValueError and OSError."""
    requests: list[Request] = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if limit is not None and len(requests) == limit:
            break
        if text.strip():
            requests.append(_read_line(f"{path}, line {number}", text, max_tokens))
    if not requests:
        raise ValueError(f"{path} has no prompts")
    if len({type(request.prompt) for request in requests}) > 1:
        raise ValueError(f"{path} mixes prompts and messages, which go to two endpoints")
    if rate_per_s is not None:
        arrivals_s = poisson_arrivals_s(len(requests), rate_per_s)
        requests = [replace(each, arrival_s=arrival_s) for each, arrival_s in zip(requests, arrivals_s, strict=True)]
    return FileWorkload(path.name, requests)


def _read_line(place: str, text: bytes, max_tokens: int) -> Request:
    try:
        line = msgspec.json.decode(text, type=Line)
    except msgspec.MsgspecError as problem:
        raise ValueError(f"{place}: {problem}") from problem
    prompt = line.messages if line.prompt is None else line.prompt
    if prompt is None or (line.prompt is not None and line.messages is not None):
        raise ValueError(f"{place}: needs either prompt or messages")
    return Request(prompt, 0, line.max_tokens or max_tokens, 0.0)
