"""The text side of a generation: from updates of the engine client to the text of each choice, and the usage."""

from __future__ import annotations

import logging

from octavo.api_server.engine_client import Generation, Update
from octavo.api_server.errors import internal_error
from octavo.api_server.generation.gate import Submission
from octavo.api_server.generation.output_processor import OutputProcessor, TextDelta
from octavo.api_server.openai.schemas import PromptTokensDetails, Usage
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.engine_messages import BeamOutput

logger = logging.getLogger(__name__)


class Choices:
    """An OutputProcessor per choice. Choice j of prompt i has the index i × n + j, best beam first."""

    def __init__(self, submission: Submission, generation: Generation, tokenizer: Tokenizer) -> None:
        self.submission = submission
        self.generation = generation
        num_copies = submission.num_choices_per_prompt // submission.num_requests_per_prompt
        self.processors = [
            OutputProcessor(
                tokenizer,
                request.prompt_token_ids,
                submission.stop,
                request.sampling_params,
                submission.skip_special_tokens,
                submission.include_stop_string,
            )
            for request in submission.requests
            for _ in range(num_copies)
        ]
        self.num_unfinished = len(self.processors)

    async def next_deltas(self) -> list[tuple[int, TextDelta]]:
        """Wait for output; return (choice index, delta) pairs, none when there was only a wake-up."""
        deltas = []
        for update in await self.generation.updates():
            deltas += self._beam_deltas(update) if self.submission.is_beam_search else [self._delta(update)]
        self.num_unfinished -= sum(delta.finish_reason is not None for _, delta in deltas)
        return deltas

    def usage(self) -> Usage:
        """Tokens so far: a prompt counts once, however many choices it has."""
        num_prompt_tokens = sum(self.submission.prompt_lengths)
        num_output_tokens = sum(processor.num_output_tokens for processor in self.processors)
        first_choices = self.generation.live_requests[:: self.submission.num_requests_per_prompt]
        num_cached_tokens = sum(live.num_cached_tokens or 0 for live in first_choices)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached_tokens),
        )

    def _delta(self, update: Update) -> tuple[int, TextDelta]:
        delta = self.processors[update.index].process(update.token_ids, update.finish_reason, update.stop_token_id)
        if delta.finish_reason is not None:
            self.generation.stop(update.index)
        return update.index, delta

    def _beam_deltas(self, update: Update) -> list[tuple[int, TextDelta]]:
        """A search answers once, with all its beams."""
        beams: list[BeamOutput] = [] if update.ending is None else update.ending.beams
        n = self.submission.num_choices_per_prompt
        if len(beams) != n:
            logger.error("a beam search for %d choices ended with %d", n, len(beams))
            raise internal_error()
        return [
            (index, self.processors[index].process(beam.token_ids, beam.finish_reason, beam.stop_token_id))
            for index, beam in enumerate(beams, update.index * n)
        ]
