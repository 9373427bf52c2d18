"""POST /v1/completions: its body as a draft, output in the shape of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from octavo.api_server.errors import invalid_value
from octavo.api_server.generation.job import Draft, OutputEvent, Prompts, WholeChoice
from octavo.api_server.generation.run import Run
from octavo.api_server.openai.common_schemas import Usage
from octavo.api_server.openai.completion_schemas import Completion, CompletionChoice, CompletionRequest
from octavo.api_server.openai.fields import rendering_of, sampling_fields, shared_parts
from octavo.api_server.openai.logprobs import completion_logprobs, prompt_logprobs
from octavo.api_server.openai.renderer import ChunkRenderer, Envelope
from octavo.api_server.openai.unsupported import COMPLETION_NO_OPS, check_supported
from octavo.protocol.sampling_params import NO_LOGPROBS

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionFormat:
    """The endpoint's bodies."""

    body_type = CompletionRequest

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def draft(self, body: CompletionRequest) -> Draft:
        check_supported(body, COMPLETION_NO_OPS)
        rendering = rendering_of(
            body,
            echo=bool(body.echo),
            num_logprobs=NO_LOGPROBS if body.logprobs is None else body.logprobs,
            logs_silent_tokens=True,  # evaluation harnesses count on an entry for every token
        )
        return Draft(
            prompts=_prompts(body),
            sampling=sampling_fields(body, body.max_tokens),
            rendering=rendering,
            add_special_tokens=body.add_special_tokens is not False,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            **shared_parts(body),
        )

    def renderer(self, body: CompletionRequest, run: Run) -> ChunkRenderer:
        envelope = Envelope.create("cmpl-", self.model_name, body)
        return ChunkRenderer(CompletionShape(envelope, body, run), body, run)


class CompletionShape:
    """The answer to one completion request."""

    def __init__(self, envelope: Envelope, body: CompletionRequest, run: Run) -> None:
        self.envelope = envelope
        self.body = body
        self.run = run

    def opening_chunk(self, index: int) -> Completion | None:
        if not self.body.return_token_ids:
            return None
        choice = CompletionChoice(index=index, text="", logprobs=None, finish_reason=None)
        choice.prompt_token_ids = self._prompt_token_ids(index)
        return self._chunk(choice)

    def chunk(self, output: OutputEvent) -> Completion:
        return self._chunk(
            CompletionChoice(index=output.index, text=output.content, finish_reason=None, **self._extras(output))
        )

    def finish_chunk(self, output: OutputEvent) -> Completion:
        reason, stop_reason = output.ending or (None, None)
        return self._chunk(
            CompletionChoice(index=output.index, text="", logprobs=None, finish_reason=reason, stop_reason=stop_reason)
        )

    def usage_chunk(self, usage: Usage) -> Completion:
        return self._completion([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> Completion:
        return self._completion([self._choice(choice) for choice in choices], usage)

    def _choice(self, choice: WholeChoice) -> CompletionChoice:
        result = CompletionChoice(
            index=choice.index,
            text=choice.content,
            finish_reason=choice.ending.finish_reason,
            stop_reason=choice.ending.stop_reason,
            **self._extras(choice),
        )
        if self.body.return_token_ids:
            result.prompt_token_ids = self._prompt_token_ids(choice.index)
        if self.body.prompt_logprobs is not None:
            entries = self.run.prompt_logprobs(choice.index // self.run.job.n)
            result.prompt_logprobs = prompt_logprobs(entries, self.body.prompt_logprobs)
        return result

    def _extras(self, output: OutputEvent | WholeChoice) -> dict[str, Any]:
        """Return the fields beside the text that the client asked for."""
        extras: dict[str, Any] = {"logprobs": None}
        if self.body.logprobs is not None:
            extras["logprobs"] = completion_logprobs(output.logprobs, bool(self.body.return_tokens_as_token_ids))
        if self.body.return_token_ids:
            extras["token_ids"] = [*output.token_ids]
        return extras

    def _prompt_token_ids(self, index: int) -> list[int]:
        return self.run.job.prompt_token_ids(index // self.run.job.n)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        chunk = self._completion([choice], None)
        chunk.usage = self.envelope.usage
        return chunk

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(**self.envelope.fields("text_completion"), choices=choices, usage=usage)


def _prompts(body: CompletionRequest) -> Prompts:
    """Return the prompts of any of the four forms: a string, strings, token ids, lists of token ids."""
    if isinstance(body.prompt, str):
        return (body.prompt,)
    kinds = {type(item) for item in body.prompt}
    if len(kinds) != 1:
        raise invalid_value("prompt", "must be a string, token ids, or a list that is not empty of one of these")
    return cast("Prompts", (body.prompt,) if kinds == {int} else tuple(body.prompt))
