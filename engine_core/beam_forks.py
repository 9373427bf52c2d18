"""How a beam search's choices become block tables.

When all beams have reported, each continuation goes on from the table of its parent. The first continuation of a
parent keeps the parent's request, its table and its row. Every other one is a fork: it takes over the request of a
beam that ended, or a new one; it shares the parent's full blocks, and its partial last block is copied, because both
write into it next. Invariant: when a search goes on, all its beams are running and computed to the same length: a beam
that is preempted takes its report back. A new beam for which there is no row or block waits like any request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.engine_core.beam_search import BeamGroup, Continuation
from octavo.engine_core.outputs import beam_output
from octavo.engine_core.request import Request, RequestStatus
from octavo.protocol.engine_messages import RequestOutput
from octavo.protocol.worker_messages import Candidates

if TYPE_CHECKING:
    from octavo.engine_core.scheduler import Scheduler


class BeamForks:
    """The scheduler's hand for beam searches."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def report(self, beam: Request, group: BeamGroup, candidates: Candidates) -> list[RequestOutput]:
        """Take a beam's candidates; when they are the last of its group, go on or end."""
        if beam.status is not RequestStatus.RUNNING or beam.num_missing_tokens:
            return []  # preempted meanwhile: it will report again
        group.reports[beam.request_id] = candidates
        if not group.has_all_reports():
            return []
        continuations = group.select()
        if continuations:
            self._go_on(group, continuations)
            return []
        first = group.running[0]
        self.scheduler.finish_group(group)
        return [beam_output(group, first.num_cached_tokens)]

    def _go_on(self, group: BeamGroup, continuations: list[Continuation]) -> None:
        parents = group.running
        kept = {continuation.parent: continuation for continuation in reversed(continuations)}
        ended = [beam for index, beam in enumerate(parents) if index not in kept]
        for beam in ended:
            self._end(beam)
        beams = []
        for continuation in continuations:
            parent = parents[continuation.parent]
            if kept[continuation.parent] is continuation:
                beams.append(parent)
            else:
                beams.append(self._fork(group, parent, continuation, ended.pop(0) if ended else None))
        for index, continuation in kept.items():  # last, as forks begin with what the parent had
            self._append(parents[index], continuation.token_id)
        for beam in ended:
            beam.move_to(RequestStatus.FINISHED)
            del self.scheduler.requests[beam.request_id]
        group.advance(beams, [continuation.logprob for continuation in continuations])

    def _end(self, beam: Request) -> None:
        """Give up a beam's blocks, but keep its request: another one may take it over."""
        self.scheduler.release(beam)
        beam.move_to(RequestStatus.WAITING)

    def _fork(self, group: BeamGroup, parent: Request, continuation: Continuation, beam: Request | None) -> Request:
        if beam is None:
            beam = parent.fork(f"{group.request_id}/{group.num_forks}", group.num_forks + 1)
            group.num_forks += 1
            self.scheduler.requests[beam.request_id] = beam
        beam.output_token_ids = [*parent.output_token_ids, continuation.token_id]
        beam.block_hashes = parent.block_hashes.copy()
        beam.num_tokens = parent.num_tokens + 1
        beam.num_computed_tokens = 0
        if not self._share_blocks(parent, beam):
            self.scheduler.waiting.push(beam)
        return beam

    def _share_blocks(self, parent: Request, beam: Request) -> bool:
        """Let the beam run with a copy of the parent's table, if there is a row and a block for it."""
        scheduler, num_tokens = self.scheduler, parent.num_computed_tokens
        if len(scheduler.running) >= scheduler.config.max_num_seqs:
            return False
        prefix = scheduler.kv_cache_manager.find_fork(parent.request_id, num_tokens)
        if scheduler.kv_cache_manager.add_table(beam, prefix, num_tokens) is None:
            return False
        beam.num_computed_tokens = num_tokens
        scheduler.join_running(beam)
        scheduler.catching_up[beam.request_id] = beam
        return True

    def _append(self, beam: Request, token_id: int) -> None:
        beam.output_token_ids.append(token_id)
        beam.num_tokens += 1
        beam.unsent_token_ids = [token_id]
        self.scheduler.catching_up[beam.request_id] = beam
