"""Who joins the running requests at this step, and with which blocks it begins.

Requests are looked at in the order of the queue until one does not fit. One whose beginning is being computed for
somebody else stands aside: it is admitted when those blocks are there. Blocks can be shared from the moment in which
their computation is scheduled, also within the same step, as a layer writes all KV before it reads any; a partial
block is copied before the step computes, so it must stem from an earlier one. Rejected: looking past a request that
does not fit (it could starve).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.engine_core.admission_policy import Situation, has_room
from octavo.engine_core.invariants import require
from octavo.engine_core.kv_cache_manager import NO_PREFIX, Prefix
from octavo.engine_core.prefix_promises import PrefixPromises
from octavo.engine_core.request import Request, RequestStatus
from octavo.engine_core.step_plan import StepPlan
from octavo.protocol.config import SchedulingPolicy

if TYPE_CHECKING:
    from octavo.engine_core.scheduler import Scheduler

NUM_COMPARED_PREFIXES = 32  # how far `longest-prefix` looks; a request is passed over by at most as many at a time
MAX_TIMES_PASSED_OVER = 64


class Admission:
    """The scheduler's hand for waiting requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.promises = PrefixPromises()
        self._first_passed_over: tuple[str, int] = ("", 0)  # longest-prefix: who is first, and for how many admissions

    def admit(self, plan: StepPlan) -> None:
        """Admit as many as fit."""
        scheduler = self.scheduler
        if scheduler.waiting.deferred:
            scheduler.waiting.release_deferred(lambda awaited: self._is_awaited(plan, awaited))
        while plan.token_budget > 0 and len(scheduler.running) < scheduler.config.max_num_seqs:
            request = self._next()
            if request is None or request.num_pending_tokens > 0 or not plan.num_tokens_for(request):
                return
            prefix = self._find_prefix(request)
            awaited = self._awaited(plan, request, prefix)
            if awaited is not None:
                scheduler.waiting.defer(request, awaited)
                continue
            if not self._has_room(plan, request, prefix):
                return
            self._start(plan, request, prefix)

    # Whose turn it is

    def _next(self) -> Request | None:
        if self.scheduler.config.scheduling_policy is SchedulingPolicy.LONGEST_PREFIX:
            return self._next_by_prefix()
        return self.scheduler.waiting.peek()

    def _next_by_prefix(self) -> Request | None:
        """Of the first few, who finds most of its tokens cached; the first itself after it was passed over often."""
        first = self.scheduler.waiting.peek()
        if first is None or first.was_admitted:
            return first
        passed_over, num_times = self._first_passed_over
        if first.request_id == passed_over and num_times >= MAX_TIMES_PASSED_OVER:
            return first
        candidates = self.scheduler.waiting.peek_few(NUM_COMPARED_PREFIXES)
        return max(candidates, key=self._num_prefix_tokens)  # of equals the first

    def _num_prefix_tokens(self, request: Request) -> int:
        return self._find_prefix(request).num_tokens

    def _count_passed_over(self, request: Request) -> None:
        """Note whether the first was passed over by `request`, which is admitted."""
        first = self.scheduler.waiting.peek()
        name, num_times = self._first_passed_over
        if first is not None and first is not request:
            self._first_passed_over = (first.request_id, num_times + 1 if name == first.request_id else 1)

    # What is being computed for somebody else

    def _awaited(self, plan: StepPlan, request: Request, prefix: Prefix) -> str | bytes | None:
        """What the request should wait for: the prompt of the request that it forks, or the last hash of a prefix."""
        if request.status is RequestStatus.SWAPPED or request.needs_whole_prompt:
            return None
        if self._origin(request) is not None:
            return request.fork_of if self._is_awaited(plan, request.fork_of) else None
        num_blocks = (request.num_tokens - 1) // self.scheduler.kv_cache_manager.block_size
        return self.promises.last_awaited(request.block_hashes[len(prefix.blocks) : num_blocks])

    def _is_awaited(self, plan: StepPlan, awaited: object) -> bool:
        """Whether somebody will compute it in a later step, or, for a fork's origin, computes it in this one."""
        if not isinstance(awaited, str):
            return awaited in self.promises.makers
        origin = self.scheduler.requests.get(awaited)
        if origin is None or origin.status is not RequestStatus.RUNNING:
            return False
        if awaited in plan.new_requests:
            return True  # its blocks may be on their way from the host
        num_earlier_tokens = origin.num_computed_tokens - plan.num_scheduled_tokens.get(awaited, 0)
        return num_earlier_tokens < origin.num_prompt_tokens - 1

    def _origin(self, request: Request) -> Request | None:
        """The running request whose prompt this one shares."""
        origin = self.scheduler.requests.get(request.fork_of) if request.fork_of else None
        if origin is None or origin.status is not RequestStatus.RUNNING or origin.order != request.fork_of_order:
            return None
        return origin

    # What it begins with

    def _find_prefix(self, request: Request) -> Prefix:
        manager = self.scheduler.kv_cache_manager
        if request.status is RequestStatus.SWAPPED:
            return manager.find_swapped(request)
        if request.needs_whole_prompt:
            return NO_PREFIX
        prefix = manager.find_prefix(request)
        origin = self._origin(request)
        if origin is not None and prefix.num_tokens < request.num_prompt_tokens - 1:
            return manager.find_fork(origin.request_id, request.num_prompt_tokens - 1)
        return prefix

    def _has_room(self, plan: StepPlan, request: Request, prefix: Prefix) -> bool:
        scheduler = self.scheduler
        config, manager = scheduler.config, scheduler.kv_cache_manager
        num_blocks = manager.num_blocks_to_take(prefix, request.num_tokens)
        situation = Situation(
            request, num_blocks, scheduler.running, scheduler.pinned.values(), manager, scheduler.output_lengths
        )
        is_alone = not scheduler.running or (plan.is_empty and not scheduler.steps_in_flight)
        return has_room(situation, config.admission_policy, config.max_preemptions_per_request, is_alone=is_alone)

    def _start(self, plan: StepPlan, request: Request, prefix: Prefix) -> None:
        """Move the request from the queue into the step.

        It gets the blocks of all its known tokens at once, though its first chunk may need fewer: then the free
        blocks that the next request is measured against are not already promised.
        """
        scheduler = self.scheduler
        if scheduler.config.scheduling_policy is SchedulingPolicy.LONGEST_PREFIX:
            self._count_passed_over(request)
        is_swapped = request.status is RequestStatus.SWAPPED
        block_ids = scheduler.kv_cache_manager.add_table(request, prefix, request.num_tokens)
        require(block_ids is not None, "the admission policy admitted a request that has no room")
        if is_swapped:
            scheduler.kv_cache_manager.free_host(request.request_id)
        request.num_computed_tokens = prefix.num_tokens
        self._count(request, prefix)
        scheduler.waiting.remove(request, is_admitted=True)
        scheduler.join_running(request)
        if request.num_preemptions >= scheduler.config.max_preemptions_per_request:
            scheduler.pinned[request.request_id] = request
        plan.add_row(request, block_ids or [])
        scheduler.compute(plan, request, plan.num_tokens_for(request))
        if request.request_id in scheduler.catching_up:
            self.promises.promise(request)

    def _count(self, request: Request, prefix: Prefix) -> None:
        counters = self.scheduler.counters
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = min(prefix.num_tokens, request.num_prompt_tokens - 1)
            counters.num_prompt_tokens += request.num_prompt_tokens
            counters.num_cached_tokens += request.num_cached_tokens
        else:
            counters.num_recomputed_tokens += max(0, request.num_lost_tokens - prefix.num_tokens)
