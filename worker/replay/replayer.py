"""Plays a script as a worker computes a model: SchedulerOutputs in, ModelRunnerOutputs out.

A row knows how many of its tokens are computed and which token is next; nothing reads the KV blocks, so copies have
nothing to do. A steady request is no more than an iterator of tokens, which is what makes the engine free: a step costs
a fraction of a microsecond for each. Bias, penalties, masks, temperature and seeds change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

from octavo.protocol.engine_messages import ErrorCode
from octavo.protocol.logprobs import PromptLogprobs
from octavo.protocol.sampling_params import NO_LOGPROBS
from octavo.protocol.worker_messages import NO_TOKEN, Candidates, ModelRunnerOutput, NewRequest, SchedulerOutput
from octavo.worker.replay.answers import Answer, Answers
from octavo.worker.replay.logprob_table import LogprobTable

logger = logging.getLogger(__name__)


class PlayedStep(NamedTuple):
    """A result, and how long its step has to take at least since the one before."""

    output: ModelRunnerOutput
    duration_s: float


class Row:
    """One request.

    Attributes:
        token_ids: its output from here on; NO_TOKEN for ever when no line is for its prompt.
        num_tokens, num_computed_tokens: how far it is. Not kept up while it is steady: it lacks one token then.
        interval_s: least time between two steps that give it a token.
    """

    def __init__(self, new: NewRequest, answer: Answer | None, vocab_size: int) -> None:
        self.params = new.sampling_params
        self.prompt_token_ids = new.prompt_token_ids
        self.num_tokens = len(new.prompt_token_ids) + len(new.output_token_ids)
        self.num_computed_tokens = new.num_computed_tokens
        self.token_ids: Iterator[int] = repeat(NO_TOKEN)
        self.interval_s = 0.0
        self.table = LogprobTable(0.0, vocab_size)
        if answer is not None:
            self.token_ids = answer.token_ids(self.params.choice_index, len(new.output_token_ids))
            self.interval_s = answer.interval_s
            self.table = LogprobTable(answer.logprob, vocab_size)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked of it but tokens, as fast as they come."""
        return not self.interval_s and self.params.num_logprobs == NO_LOGPROBS

    def compute(self, num_tokens: int) -> PromptLogprobs | None:
        """Compute the next tokens; return what the request wants to know about the prompt tokens behind them."""
        start, self.num_computed_tokens = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        if num_tokens < 1 or self.num_computed_tokens > self.num_tokens:
            raise ValueError(f"the step reaches token {self.num_computed_tokens} of {self.num_tokens}")
        described = self.prompt_token_ids[start + 1 : self.num_computed_tokens + 1]
        if self.params.num_prompt_logprobs == NO_LOGPROBS or not described:
            return None
        return PromptLogprobs(start + 1, self.table.rows(described, self.params.num_prompt_logprobs))


class Replayer:
    """The rows of one worker.

    Attributes:
        steady: the output of each steady request, in the order in which they joined.
        watched: rows that are not plain.
    """

    def __init__(self, answers: Answers, vocab_size: int) -> None:
        self.answers = answers
        self.vocab_size = vocab_size
        self.rows: dict[str, Row] = {}
        self.steady: dict[str, Iterator[int]] = {}
        self.watched: dict[str, Row] = {}

    def execute(self, step: SchedulerOutput) -> PlayedStep:
        """Play one step; raises KeyError or ValueError for one that does not fit the rows that earlier steps made."""
        for request_id in step.dropped_request_ids:
            del self.rows[request_id]
            self.steady.pop(request_id, None)
            self.watched.pop(request_id, None)
        errors = {new.request_id: ErrorCode.INTERNAL_ERROR for new in step.new_requests if not self._add(new)}
        for cached in step.cached_requests:
            self.rows[cached.request_id].num_tokens += len(cached.new_token_ids)
        for request_id in step.steady_left:
            del self.steady[request_id]
        for request_id in step.steady_joined:
            self.steady[request_id] = self.rows[request_id].token_ids
        return self._play(step, errors)

    def _add(self, new: NewRequest) -> bool:
        """Make a row; return whether there is an answer for it."""
        answer = self.answers.find(new.prompt_token_ids)
        if answer is None:
            num_tokens = len(new.prompt_token_ids)
            logger.warning("no line of the script is for request %s, a prompt of %d tokens", new.request_id, num_tokens)
        row = self.rows[new.request_id] = Row(new, answer, self.vocab_size)
        if not row.is_plain:  # as it was before, if this one replaces another: prompt and options stay
            self.watched[new.request_id] = row
        return answer is not None

    def _play(self, step: SchedulerOutput, errors: dict[str, ErrorCode]) -> PlayedStep:
        sampled = dict(zip(self.steady, map(next, self.steady.values()), strict=True))
        prompt_logprobs: dict[str, PromptLogprobs] = {}
        candidates: dict[str, Candidates] = {}
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            row = self.rows[request_id]
            described = row.compute(num_tokens)
            if described is not None:
                prompt_logprobs[request_id] = described
            if row.num_computed_tokens < row.num_tokens:
                continue
            token_id = next(row.token_ids)
            if row.params.num_candidates and token_id != NO_TOKEN:
                candidates[request_id] = row.table.candidates(token_id, row.params.num_candidates)
                token_id = NO_TOKEN
            else:
                row.num_tokens += 1
            sampled[request_id] = token_id
        watched = [(request_id, row) for request_id, row in self.watched.items() if request_id in sampled]
        logprobs = {
            request_id: row.table.rows([sampled[request_id]], row.params.num_logprobs)
            for request_id, row in watched
            if row.params.num_logprobs != NO_LOGPROBS and sampled[request_id] != NO_TOKEN
        }
        output = ModelRunnerOutput(
            step.step_id,
            [*sampled.values()],
            errors,
            candidates,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return PlayedStep(output, max((row.interval_s for _, row in watched), default=0.0))
