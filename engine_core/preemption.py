"""What a preemption does with the victim's KV, and what the log says of it.

The host tier has room: swapping costs two copies of each block, recomputing costs a prefill of all its tokens; the
cheaper one by the worker's own measurement is taken. Rejected: swapping always (on a slow link a short request is
computed sooner than it is copied), and a line in the log per victim (a burst may have thousands).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo.engine_core.request import Request, RequestStatus
from octavo.protocol.config import PreemptionMode
from octavo.protocol.worker_messages import WorkerReady

if TYPE_CHECKING:
    from octavo.engine_core.scheduler import Scheduler
    from octavo.engine_core.step_plan import StepPlan

logger = logging.getLogger(__name__)

QUIET_STEPS_AFTER_A_BURST = 256
MAX_STEPS_OF_A_BURST = 8192  # then it is written, though it goes on
MAX_NAMED_REQUESTS = 4


def is_swap_cheaper(num_tokens: int, num_blocks: int, mode: PreemptionMode, speeds: WorkerReady) -> bool:
    """Whether a victim with so many computed tokens in so many blocks should be swapped out, room provided.

    A speed that was not measured decides for the swap: it keeps what was computed.
    """
    if mode is not PreemptionMode.AUTO or not speeds.copied_blocks_per_s or not speeds.prefill_tokens_per_s:
        return mode is not PreemptionMode.RECOMPUTE
    return 2 * num_blocks / speeds.copied_blocks_per_s < num_tokens / speeds.prefill_tokens_per_s


class PreemptionLog:
    """One line per burst: it is written when no request was preempted for a while."""

    def __init__(self) -> None:
        self._victims: dict[str, int] = {}  # request_id -> preemptions in this burst
        self._num_swaps = 0
        self._num_lost_tokens = 0
        self._first_step_id = 0
        self._last_step_id = 0

    def add(self, request: Request, step_id: int, *, is_swapped: bool) -> None:
        """Note a preemption, before the request loses its lengths."""
        if not self._victims:
            self._first_step_id = step_id
        self._victims[request.request_id] = self._victims.get(request.request_id, 0) + 1
        self._num_swaps += is_swapped
        self._num_lost_tokens += 0 if is_swapped else request.num_computed_tokens
        self._last_step_id = step_id

    def end_burst(self, step_id: int, *, is_idle: bool = False) -> None:
        """Write the line if the burst is over: after some steps, or when there is no more work."""
        is_over = is_idle or step_id >= min(
            self._last_step_id + QUIET_STEPS_AFTER_A_BURST, self._first_step_id + MAX_STEPS_OF_A_BURST
        )
        if not self._victims or not is_over:
            return
        named = ", ".join(list(self._victims)[:MAX_NAMED_REQUESTS])
        rest = len(self._victims) - MAX_NAMED_REQUESTS
        logger.warning(
            "KV blocks were short: %d preemptions of %d requests (%d swapped to the host, %d tokens given up): %s%s",
            sum(self._victims.values()),
            len(self._victims),
            self._num_swaps,
            self._num_lost_tokens,
            named,
            f" and {rest} more" if rest > 0 else "",
        )
        self._victims.clear()
        self._num_swaps = self._num_lost_tokens = 0


class Preemption:
    """The scheduler's hand for requests that have to give up their blocks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.log = PreemptionLog()

    def preempt(self, request: Request) -> None:
        """Take the request's device blocks and let it wait at its own place; a pending token still arrives."""
        scheduler = self.scheduler
        scheduler.counters.num_preemptions += 1
        scheduler.leave_running(request)
        if request.beam_group is not None:  # its last token has to be computed again, for a new report
            request.beam_group.reports.pop(request.request_id, None)
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.num_preemptions += 1
        scheduler.register_blocks(request)
        is_swapped = self._swap_out(request)
        self.log.add(request, scheduler.plan.step_id, is_swapped=is_swapped)
        if is_swapped:
            request.num_lost_tokens = 0
        else:
            scheduler.kv_cache_manager.free(request.request_id)
            request.num_lost_tokens = request.num_computed_tokens
            request.num_computed_tokens = 0
        request.move_to(RequestStatus.SWAPPED if is_swapped else RequestStatus.WAITING)
        scheduler.waiting.push(request)

    def _swap_out(self, request: Request) -> bool:
        manager = self.scheduler.kv_cache_manager
        num_blocks = manager.num_blocks_for(request.num_computed_tokens)
        mode = self.scheduler.config.preemption_mode
        is_cheaper = is_swap_cheaper(request.num_computed_tokens, num_blocks, mode, self.scheduler.memory)
        return is_cheaper and manager.swap_out(request)

    def recompute_corrupt(self, plan: StepPlan, block_ids: list[int]) -> None:
        """Whoever got one of these blocks by the step, or has one by now, starts over from its tokens.

        What it computed meanwhile may be wrong, too, also when it was preempted, or has ended, since.
        """
        scheduler, corrupt = self.scheduler, set(block_ids)
        tables = scheduler.kv_cache_manager.block_tables
        given = {name for name, row in plan.new_requests.items() if corrupt.intersection(row.block_ids)}
        affected = dict.fromkeys(request for request in plan.scheduled if request.request_id in given)
        for request in scheduler.running:
            if corrupt.intersection(tables[request.request_id]) or request.fork_of in given:
                affected[request] = None
        for request in affected:
            scheduler.kv_cache_manager.forget(request.block_hashes)
            if request.status is not RequestStatus.FINISHED:
                self._start_over(request)

    def _start_over(self, request: Request) -> None:
        scheduler = self.scheduler
        request.has_failed = True  # what it computed is not to be named again
        scheduler.release(request)
        fresh = request.start_over()
        if fresh.beam_group is not None:
            fresh.beam_group.replace(request, fresh)
        scheduler.requests[fresh.request_id] = fresh
        scheduler.waiting.push(fresh)
