"""The script as tokens: which answer a prompt gets, and what each choice of it says.

The model's tokenizer reads prompts and encodes texts, so an answer comes out as that tokenizer gives text back. It is
the library's own: nothing here needs what the API server's has beyond that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice, repeat
from pathlib import Path
from typing import NamedTuple

import tokenizers

from octavo.protocol.config import ModelConfig
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.replay.script import Line, wrong_line


class Answer(NamedTuple):
    """What one line says.

    Attributes:
        prompt_contains, logprob: as in the line.
        choices: token ids of each choice.
        eos_token_id: what comes when they are over; None: they begin again.
        interval_s: least time between two steps in which it gets a token.
    """

    prompt_contains: str
    choices: tuple[tuple[int, ...], ...]
    eos_token_id: int | None
    interval_s: float
    logprob: float

    def token_ids(self, choice_index: int, position: int = 0) -> Iterator[int]:
        """Yield without end the tokens of a choice from `position` of its output on.

        The position alone says which token it is, so whoever resumes or restarts a request gets the same.
        """
        token_ids = self.choices[choice_index % len(self.choices)]
        if self.eos_token_id is None:
            return islice(cycle(token_ids), position % len(token_ids), None)
        return chain(token_ids[position:], repeat(self.eos_token_id))


class Answers:
    """All answers of a script, for one model."""

    def __init__(self, path: str, lines: dict[int, Line], tokenizer: tokenizers.Tokenizer, model: ModelConfig) -> None:
        """Raise StartupError(USAGE) for a line, by its number in the file at `path`, that this model cannot say."""
        self._tokenizer = tokenizer
        self._model = model
        self._answers: list[Answer] = []
        for number, line in lines.items():
            try:
                self._answers.append(self._make(line))
            except ValueError as problem:
                raise wrong_line(path, number, str(problem)) from problem

    def find(self, prompt_token_ids: Sequence[int]) -> Answer | None:
        """Return the first answer whose line is for this prompt."""
        text = self._tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        return next((answer for answer in self._answers if answer.prompt_contains in text), None)

    def _make(self, line: Line) -> Answer:
        choices = tuple(self._choices(line))
        if max(map(max, filter(None, choices)), default=0) >= self._model.vocab_size:
            raise ValueError(f"a token id is not below the model's vocab_size, {self._model.vocab_size}")
        if line.ends and not self._model.eos_token_ids:
            raise ValueError('the model has no EOS token to end with: say "ends": false')
        if not line.ends and not all(choices):
            raise ValueError("an answer that does not end needs tokens to repeat")
        eos_token_id = self._model.eos_token_ids[0] if line.ends else None
        return Answer(line.prompt_contains, choices, eos_token_id, line.interval_ms / 1000, line.logprob)

    def _choices(self, line: Line) -> Iterator[tuple[int, ...]]:
        if line.token_ids is not None:
            yield line.token_ids
        for text in line.texts or (() if line.text is None else (line.text,)):
            yield tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def load_answers(path: str, lines: dict[int, Line], model: ModelConfig) -> Answers:
    """Load the model's tokenizer and encode the script; raises StartupError."""
    tokenizer_path = Path(model.path) / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    except Exception as problem:  # the library raises nothing more precise
        raise StartupError(ExitCode.MODEL_NOT_FOUND, f"{tokenizer_path} cannot be read: {problem}") from problem
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Answers(path, lines, tokenizer, model)
