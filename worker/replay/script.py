"""The script of the replay engine: a file with one JSON object per line, each an answer and the prompts that get it.

    {"prompt_contains": "capital of France", "text": "Paris."}
    {"prompt_contains": "Say hello", "texts": ["Hello there", "Hi"], "interval_ms": 20}
    {"token_ids": [1, 2, 3], "ends": false, "logprob": -0.1}

Invariant: a script that was read can be played; a line that is wrong is refused with its number, because a test that
runs with half of its answers says nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from octavo.protocol.lifecycle import ExitCode, StartupError

MAX_INTERVAL_MS = 60_000.0
DEFAULT_LOGPROB = -0.5


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line.

    Attributes:
        prompt_contains: the line answers prompts whose text, template and special tokens included, has this in it.
        text: the answer.
        texts: one answer for each choice of `n`; when there are more choices they begin again with the first.
        token_ids: the answer as tokens, for what no text is encoded as. Exactly one of these three is given.
        ends: after its last token comes EOS; else the answer begins again and again until `max_tokens`.
        interval_ms: least time between two steps in which this answer gets a token. All that share the step wait.
        logprob: of each of its tokens, and of the prompt's, where a request asks for logprobs.
    """

    prompt_contains: str = ""
    text: str | None = None
    texts: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] | None = None
    token_ids: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)] | None = None
    ends: bool = True
    interval_ms: Annotated[float, msgspec.Meta(ge=0, le=MAX_INTERVAL_MS)] = 0.0
    logprob: Annotated[float, msgspec.Meta(le=0)] = DEFAULT_LOGPROB

    def __post_init__(self) -> None:
        """Raise ValueError unless the line has one answer."""
        if [self.text, self.texts, self.token_ids].count(None) != 2:
            raise ValueError("a line has exactly one of text, texts and token_ids")


def read_script(path: str) -> dict[int, Line]:
    """Return the lines by their numbers, from 1; empty ones are left out. Raises StartupError(USAGE)."""
    try:
        rows = Path(path).read_bytes().split(b"\n")
    except OSError as problem:
        raise StartupError(ExitCode.USAGE, f"cannot read the script {path}: {problem.strerror}") from problem
    decode = msgspec.json.Decoder(Line).decode
    lines: dict[int, Line] = {}
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            lines[number] = decode(row)
        except ValueError as problem:  # what msgspec raises is one as well, and so is bad UTF-8
            raise wrong_line(path, number, str(problem)) from problem
    if not lines:
        raise StartupError(ExitCode.USAGE, f"the script {path} has no lines")
    return lines


def wrong_line(path: str, number: int, problem: str) -> StartupError:
    """Line `number`, counted from 1, cannot be played."""
    return StartupError(ExitCode.USAGE, f"{path}, line {number}: {problem}")
