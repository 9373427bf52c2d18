"""The text side of a run: from updates of the engine client to the events of each choice, and the counts."""

from __future__ import annotations

import logging

from octavo.api_server.engine_client import Generation, Update
from octavo.api_server.errors import internal_error
from octavo.api_server.generation.job import Counts, Job, OutputEvent
from octavo.api_server.generation.output_processor import DroppedOutput, OutputProcessor
from octavo.api_server.generation.prompt_logs import PromptLogs
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.engine_messages import BeamOutput
from octavo.protocol.sampling_params import NO_LOGPROBS

logger = logging.getLogger(__name__)


class Choices:
    """A processor per choice. Choice j of prompt i has the index i × n + j, best beam first."""

    def __init__(
        self, job: Job, generation: Generation, tokenizer: Tokenizer, prompt_logs: PromptLogs | None = None
    ) -> None:
        """`prompt_logs` has the entries of a prompt before its choices have updates; None where nobody asked."""
        self.job = job
        self.generation = generation
        self.prompt_logs = prompt_logs
        self.processors = [self._new_processor(index, tokenizer) for index in range(job.num_choices)]
        self.num_unfinished = len(self.processors)
        self._is_open = [not job.rendering.echo] * job.num_choices

    def events(self, updates: list[Update]) -> list[OutputEvent]:
        """Return what `updates` bring to the choices."""
        events: list[OutputEvent] = []
        for update in updates:
            events += self._beam_events(update) if self.job.is_beam_search else self._events(update)
        return events

    def counts(self) -> Counts:
        """Return the tokens so far."""
        first_choices = self.generation.live_requests[:: self.job.num_requests_per_prompt]
        is_parsed = self.job.reading is not None
        return Counts(
            sum(self.job.prompt_lengths),
            sum(processor.num_output_tokens for processor in self.processors),
            sum(live.num_cached_tokens or 0 for live in first_choices),
            sum(processor.num_reasoning_tokens for processor in self.processors) if is_parsed else None,
        )

    def _new_processor(self, index: int, tokenizer: Tokenizer) -> OutputProcessor | DroppedOutput:
        job = self.job
        if job.drops_output:
            return DroppedOutput(index)
        prompt_index = index // job.n
        return OutputProcessor(
            tokenizer,
            job.prompt_token_ids(prompt_index),
            job.stop,
            job.sampling_params(prompt_index),
            job.rendering,
            index,
            job.reading,
            len(job.echoed[prompt_index]) if job.echoed else 0,
        )

    def _opening(self, index: int) -> list[OutputEvent]:
        """Return the event of the prompt that the answer echoes, before its first output; nothing if it does not."""
        if self._is_open[index]:
            return []
        self._is_open[index] = True
        prompt_index, num_listed = index // self.job.n, self.job.rendering.num_logprobs
        entries = []
        if self.prompt_logs is not None and num_listed != NO_LOGPROBS:
            entries = [
                entry._replace(likeliest=entry.likeliest[:num_listed])
                for entry in self.prompt_logs.entries[prompt_index]
            ]
        return [OutputEvent(index, self.job.echoed[prompt_index], logprobs=tuple(entries))]

    def _events(self, update: Update) -> list[OutputEvent]:
        index = update.index
        events = self.processors[index].process(
            update.token_ids, update.finish_reason, update.stop_token_id, update.logprobs
        )
        if events and events[-1].ending is not None:
            self.num_unfinished -= 1
            self.generation.stop(index)
        return events if self._is_open[index] else self._opening(index) + events

    def _beam_events(self, update: Update) -> list[OutputEvent]:
        """A search answers once, with all its beams."""
        beams: list[BeamOutput] = [] if update.ending is None else update.ending.beams
        n = self.job.n
        if len(beams) != n:
            logger.error("a beam search for %d choices ended with %d", n, len(beams))
            raise internal_error()
        events: list[OutputEvent] = []
        for index, beam in enumerate(beams, update.index * n):
            events += self._opening(index)
            events += self.processors[index].process(beam.token_ids, beam.finish_reason, beam.stop_token_id)
        self.num_unfinished -= n
        return events
