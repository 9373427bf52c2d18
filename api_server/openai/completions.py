"""POST /v1/completions: the shape of its answers."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.api_server.openai.answer import Envelope, FinishedChoice
from octavo.api_server.openai.schemas import Completion, CompletionChoice, Usage


class CompletionAnswer:
    """The answer to one completion request."""

    def __init__(self, model: str, has_usage: bool) -> None:
        self.envelope = Envelope.create("cmpl-", model, has_usage)

    def opening_chunk(self, index: int) -> None:
        return None

    def text_chunk(self, index: int, text: str) -> Completion:
        return self._chunk(CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None))

    def finish_chunk(self, index: int, finish_reason: str, stop_reason: str | int | None) -> Completion:
        return self._chunk(
            CompletionChoice(index=index, text="", logprobs=None, finish_reason=finish_reason, stop_reason=stop_reason)
        )

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def whole(self, choices: Sequence[FinishedChoice], usage: Usage) -> Completion:
        return self._completion(
            [
                CompletionChoice(
                    index=index,
                    text=choice.text,
                    logprobs=None,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for index, choice in enumerate(choices)
            ],
            usage,
        )

    def _chunk(self, choice: CompletionChoice) -> Completion:
        chunk = self._completion([choice], None)
        chunk.usage = self.envelope.usage
        return chunk

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(**self.envelope.fields("text_completion"), choices=choices, usage=usage)
