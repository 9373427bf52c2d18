"""Beam search over one prompt: which continuations go on, which are finished, when it ends.

The selection is that of transformers' `generate` with `num_beams` and without sampling: of all continuations of all
beams the best `num_candidates` are looked at; those that end are finished beams if they are among the first
`num_beams`, the first `num_beams` of the others go on. Memory is not its concern: it says which beam goes on from
which (`Continuation.parent`), and the scheduler forks block tables accordingly. Invariant: `running` and the parents
of a selection are in order of score, best first; equal scores keep the order of (beam, token id).

Rejected: beams as independent requests steered from outside the engine core, which recomputes or looks up every
beam's beginning at each step, and cannot share the block that is being written.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.engine_core.request import Request
from octavo.protocol.engine_messages import BeamOutput, BeamSearchParams, EarlyStopping, FinishReason
from octavo.protocol.worker_messages import Candidates


class Continuation(NamedTuple):
    """A beam of the next length: index of the beam that it goes on from, its new token, its sum of logprobs."""

    parent: int
    token_id: int
    logprob: float


class BeamGroup:
    """One search.

    Attributes:
        running: the beams, best first; at first the one request that computes the prompt.
        logprobs: sums of the running beams' logprobs.
        reports: candidates of the running beams for their next token, as far as they are here.
        finished: the best finished beams so far, best first.
    """

    def __init__(self, params: BeamSearchParams, first_beam: Request) -> None:
        self.params = params
        self.request_id = first_beam.request_id
        self.running = [first_beam]
        self.logprobs = [0.0]
        self.reports: dict[str, Candidates] = {}
        self.finished: list[BeamOutput] = []
        self.num_forks = 0

    def has_all_reports(self) -> bool:
        return len(self.reports) == len(self.running)

    def select(self) -> list[Continuation]:
        """Take the reports; return the beams of the next length, best first; none when the search is over."""
        best = self._best_continuations()
        first = self.running[0]
        num_output_tokens = first.num_output_tokens + 1
        is_last_length = first.num_prompt_tokens + num_output_tokens >= first.max_num_tokens
        going_on: list[Continuation] = []
        for rank, continuation in enumerate(best):
            if is_last_length or continuation.token_id in first.stop_token_ids:
                if rank < self.params.num_beams:
                    self._finish(continuation, num_output_tokens)
            elif len(going_on) < self.params.num_beams:
                going_on.append(continuation)
        return going_on if self._goes_on(going_on, num_output_tokens) else []

    def advance(self, beams: list[Request], logprobs: list[float]) -> None:
        """Make these the running beams."""
        self.running = beams
        self.logprobs = logprobs

    def replace(self, beam: Request, fresh: Request) -> None:
        """Let `fresh` stand for `beam`, which has to report again."""
        self.reports.pop(beam.request_id, None)
        self.running = [fresh if member is beam else member for member in self.running]

    def _best_continuations(self) -> list[Continuation]:
        continuations = [
            Continuation(parent, token_id, total + logprob)
            for parent, (beam, total) in enumerate(zip(self.running, self.logprobs, strict=True))
            for token_id, logprob in zip(*self._report(beam), strict=True)
        ]
        self.reports.clear()
        continuations.sort(key=lambda c: (-c.logprob, c.parent, c.token_id))
        return continuations[: self.running[0].sampling_params.num_candidates]

    def _report(self, beam: Request) -> tuple[list[int], list[float]]:
        report = self.reports[beam.request_id]
        return report.token_ids, report.logprobs

    def _finish(self, continuation: Continuation, num_output_tokens: int) -> None:
        beam = self.running[continuation.parent]
        is_stop = continuation.token_id in beam.stop_token_ids
        output = BeamOutput(
            [*beam.output_token_ids, continuation.token_id],
            continuation.logprob / num_output_tokens**self.params.length_penalty,
            FinishReason.STOP if is_stop else FinishReason.LENGTH,
            continuation.token_id if is_stop else None,
        )
        self.finished.append(output)
        self.finished.sort(key=lambda finished: -finished.score)
        del self.finished[self.params.num_beams :]

    def _goes_on(self, going_on: list[Continuation], num_output_tokens: int) -> bool:
        if not going_on:
            return False
        if len(self.finished) < self.params.num_beams:
            return True
        if self.params.early_stopping is EarlyStopping.ALWAYS:
            return False
        length = num_output_tokens
        if self.params.early_stopping is EarlyStopping.NEVER and self.params.length_penalty > 0:
            length = self.running[0].max_num_tokens - self.running[0].num_prompt_tokens
        best_possible_score: float = going_on[0].logprob / length**self.params.length_penalty
        return best_possible_score > self.finished[-1].score
