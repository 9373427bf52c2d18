"""Which requests compute how many tokens; who is preempted, resumed, admitted; when a request ends.

One equation: every step gives each request tokens so that num_computed_tokens catches up with num_tokens. Prefill,
chunks, decode, resume and recovery after a crash are that one sentence; there are no phases. Order inside a step:

1. running requests, oldest first. When no block is free the youngest loses its blocks and waits again (recompute);
   so the oldest is never preempted by a younger one, and always gets on.
2. if nobody was preempted: waiting requests, in the order of the queue, until one does not fit.

`schedule` returns a value, workers execute it, `update` applies its result; nothing else changes a request. Step n+1
may be scheduled before the result of step n is here: the token that step n samples is then pending, and the worker
feeds it to itself. Same commands and results in, same decisions out: no clock, no randomness, no set is iterated.
Rejected: separate prefill and decode steps, and skipping a waiting request that does not fit (it could starve).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from octavo.engine_core.admission_policy import has_room, why_never
from octavo.engine_core.invariants import require
from octavo.engine_core.kv_cache_manager import KVCacheManager
from octavo.engine_core.request import Request, RequestStatus, why_malformed
from octavo.engine_core.request_queue import RequestQueue
from octavo.engine_core.stats import SchedulerCounters
from octavo.engine_core.step_plan import StepPlan
from octavo.protocol.config import ModelConfig, SchedulerConfig
from octavo.protocol.engine_messages import AddRequest, EngineStats, ErrorCode, FinishReason, RequestOutput
from octavo.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput


class UnexpectedResultError(ValueError):
    """A result that does not belong to the oldest step in flight."""


class Scheduler:
    """Decides steps for the requests that it was given.

    Attributes:
        requests: all that are not finished, by request_id.
        running: those that hold blocks and a row, oldest first.
        waiting: the others.
        steps_in_flight: scheduled steps whose result is not here yet, oldest first.
    """

    def __init__(self, model: ModelConfig, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self.model = model
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = RequestQueue()
        self.steps_in_flight: deque[StepPlan] = deque()
        self.counters = SchedulerCounters()
        self._dropped_request_ids: list[str] = []  # rows that the next step has to drop
        self._num_added_requests = 0

    # Commands

    def add(self, command: AddRequest) -> RequestOutput | None:
        """Queue a request; return its one output when it ends here and now.

        That is when it is malformed, when it can never fit, or when it was sent again although its output is already
        complete. A request whose id is live is ignored.
        """
        if command.request_id in self.requests:
            return None
        self._num_added_requests += 1
        request = Request(command, self._num_added_requests, self.model)
        problem = why_malformed(command, self.model.vocab_size)
        if problem is not None:
            return self._error(request, ErrorCode.INTERNAL_ERROR, problem)
        problem = why_never(request, self.model.max_model_len, self.kv_cache_manager)
        if problem is not None:
            return self._error(request, ErrorCode.NEVER_FITS, problem)
        if request.finish_reason() is not None:
            return self._output(request, [])
        self.requests[request.request_id] = request
        self.waiting.push(request)
        return None

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget these requests, and what is in flight for them; ids that are not live are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request)

    # One step

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; None when there is nothing to compute now."""
        plan = StepPlan(
            self.counters.num_steps,
            self.config.max_num_batched_tokens,
            self.config.max_tokens_per_request or self.config.max_num_batched_tokens,
        )
        num_preemptions = self.counters.num_preemptions
        self._schedule_running(plan)
        if self.counters.num_preemptions == num_preemptions:
            self._admit_waiting(plan)
        if not plan.scheduled:
            return None
        self.counters.num_steps += 1
        self.counters.num_scheduled_tokens += self.config.max_num_batched_tokens - plan.token_budget
        self.steps_in_flight.append(plan)
        dropped_request_ids, self._dropped_request_ids = self._dropped_request_ids, []
        return plan.output(dropped_request_ids)

    def _schedule_running(self, plan: StepPlan) -> None:
        index = 0
        while index < len(self.running) and plan.token_budget > 0:
            request = self.running[index]
            index += 1
            if request.num_tokens >= request.max_num_tokens:
                continue  # its last token is pending
            num_tokens = plan.num_tokens_for(request)
            new_block_ids = self._grow_or_preempt(request, request.num_computed_tokens + num_tokens)
            if new_block_ids is None:
                return
            if new_block_ids:
                plan.grow_row(request, new_block_ids)
            plan.schedule(request, num_tokens)

    def _grow_or_preempt(self, request: Request, num_tokens: int) -> list[int] | None:
        """Have the request's table cover `num_tokens`, preempting from the tail as long as blocks are missing.

        Returns the new block ids; None when the request, being the youngest, had to be preempted itself.
        """
        while True:
            new_block_ids = self.kv_cache_manager.grow_table(request.request_id, num_tokens)
            if new_block_ids is not None:
                return new_block_ids
            youngest = self.running.pop()
            self._preempt(youngest)
            if youngest is request:
                return None

    def _preempt(self, request: Request) -> None:
        """Give the request's blocks back and let it wait at its own place; a pending token still arrives."""
        self.counters.num_preemptions += 1
        self._release(request)
        request.num_computed_tokens = 0
        request.move_to(RequestStatus.WAITING)
        self.waiting.push(request)

    def _admit_waiting(self, plan: StepPlan) -> None:
        while plan.token_budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            if request is None or request.num_pending_tokens > 0 or not self._has_room(request):
                return
            self._admit(plan, request)

    def _has_room(self, request: Request) -> bool:
        manager = self.kv_cache_manager
        return has_room(manager.num_blocks_for(request.num_tokens), manager.num_free_blocks, len(self.running))

    def _admit(self, plan: StepPlan, request: Request) -> None:
        """Move the request from the queue into the step.

        It gets the blocks of all its known tokens at once, though its first chunk may need fewer: then the free
        blocks that the next request is measured against are not already promised.
        """
        block_ids = self.kv_cache_manager.add_table(request.request_id, request.num_tokens)
        require(block_ids is not None, "the admission policy admitted a request that has no room")
        self.waiting.remove(request)
        request.move_to(RequestStatus.RUNNING)
        insort(self.running, request, key=attrgetter("order"))
        plan.add_row(request, block_ids or [])
        plan.schedule(request, plan.num_tokens_for(request))

    # Its result

    def update(self, result: ModelRunnerOutput) -> list[RequestOutput]:
        """Apply the result of the oldest step in flight; return the new output of the requests it advanced.

        What was computed for requests that have ended meanwhile is dropped. Raises UnexpectedResultError, with
        nothing changed, for the result of any other step.
        """
        if not self.steps_in_flight or self.steps_in_flight[0].step_id != result.step_id:
            raise UnexpectedResultError(f"the result of step {result.step_id} was not expected")
        plan = self.steps_in_flight.popleft()
        outputs = self._fail_requests(plan, result.errors) if result.errors else []
        sampled_token_ids = result.sampled_token_ids
        for request in plan.sampling:
            if request.status is not RequestStatus.FINISHED:
                outputs.append(self._append(request, sampled_token_ids.get(request.request_id)))
        return outputs

    def _append(self, request: Request, token_ids: list[int] | None) -> RequestOutput:
        if token_ids is None or len(token_ids) != 1:
            self._finish(request)
            return self._error(request, ErrorCode.INTERNAL_ERROR, "the worker did not report the sampled token")
        request.output_token_ids += token_ids
        output = self._output(request, token_ids)
        if output.finish_reason is not None:
            self._finish(request)
        return output

    def _fail_requests(self, plan: StepPlan, errors: dict[str, ErrorCode]) -> list[RequestOutput]:
        failed = [
            request
            for request in plan.scheduled
            if request.request_id in errors and request.status is not RequestStatus.FINISHED
        ]
        for request in failed:
            self._finish(request)
        return [self._error(request, errors[request.request_id], "the worker failed on it") for request in failed]

    # Ends

    def _finish(self, request: Request) -> None:
        """The only way out: blocks, row and place in the queue are given up together."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        request.move_to(RequestStatus.FINISHED)
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        """Free the blocks and drop the row; steps in flight that still write there run before those of a new owner."""
        self.kv_cache_manager.free(request.request_id)
        self._dropped_request_ids.append(request.request_id)

    @staticmethod
    def _output(request: Request, token_ids: list[int]) -> RequestOutput:
        """The output that ends with the request's last token, of which `token_ids` are new."""
        finish_reason = request.finish_reason()
        return RequestOutput(
            request.request_id,
            len(request.output_token_ids) - len(token_ids),
            token_ids,
            finish_reason,
            request.output_token_ids[-1] if finish_reason is FinishReason.STOP else None,
        )

    @staticmethod
    def _error(request: Request, error: ErrorCode, message: str) -> RequestOutput:
        return RequestOutput(
            request.request_id,
            request.num_output_tokens,
            [],
            FinishReason.ERROR,
            error=error,
            error_message=message,
        )

    # What others may know

    def stats(self) -> EngineStats:
        """The state right now."""
        return EngineStats(
            num_running_requests=len(self.running),
            num_waiting_requests=len(self.waiting),
            num_used_blocks=self.kv_cache_manager.num_used_blocks,
            num_total_blocks=self.kv_cache_manager.num_total_blocks,
            num_steps=self.counters.num_steps,
            num_scheduled_tokens=self.counters.num_scheduled_tokens,
            num_preemptions=self.counters.num_preemptions,
        )

    def check_idle(self) -> None:
        """Raise InvariantError when no step is in flight and yet something is held or waits. O(1)."""
        if not self.steps_in_flight:
            require(not self.requests, f"{len(self.requests)} requests, but no step in flight")
            require(self.kv_cache_manager.num_used_blocks == 0, "blocks are held though there is no request")
