"""Which requests compute how many tokens; who is preempted, resumed, admitted; when a request ends.

One equation: every step gives each request tokens so that num_computed_tokens catches up with num_tokens. Prefill,
chunks, decode, prefix hits, resume and recovery after a crash are that one sentence; there are no phases. Order
inside a step:

1. running requests that lack one token get it (`steady_set`); those whose block table is full get a block first.
2. running requests that lack more share what is left of the token budget, oldest first.
   When no block is free the youngest running request is preempted (`preemption`); so the oldest is never preempted
   by a younger one, and always gets on.
3. if nobody was preempted: swapped and waiting requests join, in the order of the queue (`admission`).

`schedule` returns a value, workers execute it, `update` applies its result; nothing else changes a request. Step n+1
may be scheduled before the result of step n is here: the token that step n samples is then pending, and the worker
feeds it to itself. Same commands and results in, same decisions out: no clock, no randomness, no set is iterated.
Rejected: separate prefill and decode steps, and skipping a waiting request that does not fit (it could starve).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from octavo.engine_core.admission import Admission
from octavo.engine_core.admission_policy import OutputLengths, why_never
from octavo.engine_core.beam_forks import BeamForks
from octavo.engine_core.beam_search import BeamGroup
from octavo.engine_core.block_hash import hash_root
from octavo.engine_core.invariants import require
from octavo.engine_core.kv_cache_manager import KVCacheManager
from octavo.engine_core.outputs import error_output, token_output, with_logprobs
from octavo.engine_core.preemption import Preemption
from octavo.engine_core.request import Request, RequestStatus, why_malformed
from octavo.engine_core.request_queue import RequestQueue
from octavo.engine_core.stats import SchedulerCounters, read_stats
from octavo.engine_core.steady_set import NOT_STEADY, SteadySet
from octavo.engine_core.step_plan import StepPlan
from octavo.engine_core.whole_prompt import take_prompt_logprobs
from octavo.protocol.config import EngineConfig, SchedulingPolicy
from octavo.protocol.engine_messages import AddRequest, EngineStats, ErrorCode, RequestOutput
from octavo.protocol.sampling_params import MAX_NUM_CANDIDATES
from octavo.protocol.worker_messages import NO_TOKEN, ModelRunnerOutput, SchedulerOutput, WorkerReady

by_order = attrgetter("order")


class UnexpectedResultError(ValueError):
    """A result that does not belong to the oldest step in flight."""


class Scheduler:
    """Decides steps for the requests that it was given.

    Attributes:
        requests: all that are not finished, by request_id.
        beam_groups: searches that are not finished, by the request_id that was asked for.
        running: those that hold device blocks, oldest first. Each is either steady, or catching up, or waits for
            what was scheduled: for its last token, or, as a beam, for the other beams.
        pinned: running requests that were preempted too often to be preempted again (`admission_policy`).
        waiting: the others.
        steps_in_flight: scheduled steps whose result is not here yet, oldest first.
    """

    def __init__(self, config: EngineConfig, memory: WorkerReady) -> None:
        """`memory` is what all workers have in common: blocks of both tiers, and the slowest speeds."""
        self.model = config.model
        self.config = config.scheduler
        self.memory = memory
        self.kv_cache_manager = KVCacheManager(
            memory.num_device_blocks,
            config.cache.block_size,
            memory.num_host_blocks,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            enable_offload=config.cache.kv_offload_bytes > 0,
        )
        self.requests: dict[str, Request] = {}
        self.beam_groups: dict[str, BeamGroup] = {}
        self.running: list[Request] = []
        self.pinned: dict[str, Request] = {}
        self.catching_up: dict[str, Request] = {}
        self.steady = SteadySet()
        self.waiting = RequestQueue()
        self.steps_in_flight: deque[StepPlan] = deque()
        self.counters = SchedulerCounters()
        self.output_lengths = OutputLengths()
        self.admission = Admission(self)
        self.preemption = Preemption(self)
        self.beam_forks = BeamForks(self)
        self.plan = StepPlan(0, self.config, self.steady)
        self._caught_up: list[Request] = []  # by the last step; they may become steady
        self._num_added_requests = 0
        self._model_name = f"{config.model.weights_path}\0{config.model.dtype}"

    # Commands

    def add(self, command: AddRequest) -> RequestOutput | None:
        """Queue a request; return its one output when it ends here and now.

        That is when it is malformed, when it can never fit, or when it was sent again although its output is already
        complete. A request whose id is live is ignored.
        """
        if command.request_id in self.requests or command.request_id in self.beam_groups:
            return None
        self._num_added_requests += 1
        request = self._make_request(command)
        problem = why_malformed(command, self.model.vocab_size)
        if problem is not None:
            return error_output(request, ErrorCode.INTERNAL_ERROR, problem)
        problem = why_never(request, self.config.max_num_seqs, self.model.max_model_len, self.kv_cache_manager)
        if problem is not None:
            return error_output(request, ErrorCode.NEVER_FITS, problem)
        if request.finish_reason() is not None:
            return token_output(request, [])
        if request.beam_group is not None:
            self.beam_groups[request.request_id] = request.beam_group
        self._name_blocks(request)
        self.requests[request.request_id] = request
        self.waiting.push(request)
        return None

    def _make_request(self, command: AddRequest) -> Request:
        priority = command.priority if self.config.scheduling_policy is SchedulingPolicy.PRIORITY else 0
        order = (priority, command.arrival_time_s, self._num_added_requests, 0)
        request = Request(command, order, self.model, hash_root(self._model_name, "", command.cache_salt))
        if command.beam_search is not None:
            num_per_beam = max(2, 1 + len(request.stop_token_ids))  # enough that go on, if all ends are among them
            num_candidates = min(MAX_NUM_CANDIDATES, num_per_beam * command.beam_search.num_beams)
            request.sampling_params = msgspec.structs.replace(request.sampling_params, num_candidates=num_candidates)
            request.beam_group = BeamGroup(command.beam_search, request)
        return request

    def _name_blocks(self, request: Request) -> None:
        """Hash its full blocks; a fork has them from its origin, if that is live and has the same prompt."""
        origin = self.requests.get(request.fork_of)
        request.fork_of = ""
        if origin is not None and origin.is_same_prompt(request):
            num_blocks = request.num_prompt_tokens // self.kv_cache_manager.block_size
            request.block_hashes = origin.block_hashes[:num_blocks]
            request.fork_of = origin.request_id
            request.fork_of_order = origin.order
        self.kv_cache_manager.update_hashes(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget these requests, and what is in flight for them; ids that are not live are ignored."""
        for request_id in request_ids:
            group = self.beam_groups.get(request_id)
            request = self.requests.get(request_id)
            if group is not None:
                self.finish_group(group)
            elif request is not None and request.beam_group is None:
                self.finish(request)

    # One step

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step; None when there is nothing to compute now."""
        plan = self.plan
        num_preemptions = self.counters.num_preemptions
        self._join_steady(plan)
        self._grow_steady(plan)
        self._catch_up(plan)
        if self.counters.num_preemptions == num_preemptions:
            self.admission.admit(plan)
        if plan.is_empty and not self.steps_in_flight:
            self._make_way(plan)
        self.preemption.log.end_burst(plan.step_id, is_idle=not self.requests)
        if plan.is_empty:
            return None
        self._caught_up = plan.sampling
        step = plan.close(self.kv_cache_manager.take_copies())
        self.counters.num_steps += 1
        self.counters.num_scheduled_tokens += plan.num_tokens + plan.num_steady_tokens
        self.steps_in_flight.append(plan)
        self.plan = StepPlan(self.counters.num_steps, self.config, self.steady)
        return step

    def _join_steady(self, plan: StepPlan) -> None:
        """Whom the last step brought up to date is steady from now on, unless its last token is pending."""
        for request in self._caught_up:
            is_going_on = request.status is RequestStatus.RUNNING and request.num_tokens < request.max_num_tokens
            if is_going_on and request.beam_group is None:
                self.steady.join(request)
                plan.steady_joined[request.request_id] = None
                self._call_when_due(request)
        self._caught_up = []

    def _call_when_due(self, request: Request) -> None:
        num_slots = len(self.kv_cache_manager.block_tables[request.request_id]) * self.kv_cache_manager.block_size
        num_free_slots = num_slots - request.num_computed_tokens
        self.steady.call_in(request, min(num_free_slots, request.max_num_tokens - request.num_tokens))

    def _grow_steady(self, plan: StepPlan) -> None:
        for request in self.steady.due():
            if request.settled_at == NOT_STEADY:
                continue  # preempted just now
            if request.num_tokens == request.max_num_tokens:
                self.steady.leave(request)
                plan.steady_left[request.request_id] = None
            elif self._grow(plan, request, request.num_computed_tokens + 1):
                self.register_blocks(request)
                self._call_when_due(request)

    def _catch_up(self, plan: StepPlan) -> None:
        for request in sorted(self.catching_up.values(), key=by_order):
            num_tokens = plan.num_tokens_for(request)
            is_preempted = request.status is not RequestStatus.RUNNING  # just now
            if num_tokens and not is_preempted and self._grow(plan, request, request.num_computed_tokens + num_tokens):
                self.compute(plan, request, num_tokens)

    def compute(self, plan: StepPlan, request: Request, num_tokens: int) -> None:
        """Give a running request with the blocks for it its tokens; its full blocks can be shared from now on."""
        is_caught_up = plan.schedule(request, num_tokens)
        self.register_blocks(request)
        if is_caught_up:
            self.catching_up.pop(request.request_id, None)
            self.admission.promises.withdraw(request)
        else:
            self.catching_up[request.request_id] = request

    def register_blocks(self, request: Request) -> None:
        """Name the full blocks that the steps up to this one compute, and let others find them."""
        self.kv_cache_manager.update_hashes(request)
        first_block = request.num_registered_blocks
        self.kv_cache_manager.register_blocks(request, request.num_computed_tokens)
        self.admission.promises.fulfil(request, first_block)

    def _grow(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Have the request's table cover `num_tokens`, preempting the youngest as long as blocks are missing.

        False when the request, being the youngest, had to be preempted itself.
        """
        while True:
            new_block_ids = self.kv_cache_manager.grow_table(request.request_id, num_tokens)
            if new_block_ids is not None:
                break
            youngest = self.running[-1]
            self.preemption.preempt(youngest)
            if youngest is request:
                return False
        if not request.has_row:
            plan.add_row(request, self.kv_cache_manager.block_tables[request.request_id].copy())
        elif new_block_ids or request.unsent_token_ids:
            plan.grow_row(request, new_block_ids)
        return True

    def _make_way(self, plan: StepPlan) -> None:
        """All who hold blocks wait for someone who has none (beams of searches that run at once): free some."""
        if self.running and len(self.waiting):
            while self.running:  # all: so that beams begin with one copy of what they have in common again
                self.preemption.preempt(self.running[-1])
            self.admission.admit(plan)

    def join_running(self, request: Request) -> None:
        """A request that has got its blocks runs from now on."""
        request.move_to(RequestStatus.RUNNING)
        insort(self.running, request, key=by_order)

    def leave_running(self, request: Request) -> None:
        """Take the request out of all that concerns running ones, but for its blocks."""
        del self.running[bisect_left(self.running, request.order, key=by_order)]
        if request.settled_at != NOT_STEADY:
            self.steady.leave(request)
        self.pinned.pop(request.request_id, None)
        self.catching_up.pop(request.request_id, None)
        self.admission.promises.withdraw(request)
        self.plan.drop_row(request)

    # Its result

    def update(self, result: ModelRunnerOutput) -> list[RequestOutput]:
        """Apply the result of the oldest step in flight; return the new output of the requests it advanced.

        What was computed for requests that have ended meanwhile is dropped. Raises UnexpectedResultError, with
        nothing changed, for the result of any other step.
        """
        if not self.steps_in_flight or self.steps_in_flight[0].step_id != result.step_id:
            raise UnexpectedResultError(f"the result of step {result.step_id} was not expected")
        plan = self.steps_in_flight.popleft()
        sampling, token_ids = plan.sampling, result.sampled_token_ids
        if result.corrupt_block_ids:
            self.preemption.recompute_corrupt(plan, result.corrupt_block_ids)
        if len(token_ids) != len(sampling):
            token_ids = [NO_TOKEN] * len(sampling)
        outputs = self._fail_requests(plan, result) if result.errors else []
        if result.prompt_logprobs:
            outputs += take_prompt_logprobs(plan, result)
        finished = RequestStatus.FINISHED  # looked up once, not for each token
        for request, token_id in zip(sampling, token_ids, strict=True):
            if request.status is finished:
                continue
            if token_id < 0:
                outputs += self._apply_without_token(request, result)
                continue
            output_token_ids = request.output_token_ids  # written out for most tokens: calls would double the cost
            first_index = len(output_token_ids)
            output_token_ids.append(token_id)
            if token_id in request.stop_token_ids or first_index + 1 >= request.max_num_output_tokens:
                outputs.append(self._apply_last_token(request, token_id))
            else:
                outputs.append(
                    RequestOutput(request.request_id, first_index, [token_id], None, None, request.num_cached_tokens)
                )
        return with_logprobs(outputs, result.logprobs) if result.logprobs else outputs

    def _apply_last_token(self, request: Request, token_id: int) -> RequestOutput:
        """A token that may end its request: it does, but for a stop token before min_tokens."""
        output = token_output(request, [token_id])
        if output.finish_reason is not None:
            self.output_lengths.add(request.num_output_tokens)
            self.finish(request)
        return output

    def _apply_without_token(self, request: Request, result: ModelRunnerOutput) -> list[RequestOutput]:
        candidates = result.candidates.get(request.request_id)
        if candidates is not None and request.beam_group is not None:
            return self.beam_forks.report(request, request.beam_group, candidates)
        self._fail(request)
        return [error_output(request, ErrorCode.INTERNAL_ERROR, "the worker did not report the sampled token")]

    def _fail_requests(self, plan: StepPlan, result: ModelRunnerOutput) -> list[RequestOutput]:
        outputs = []
        for request in dict.fromkeys((*plan.scheduled, *plan.sampling)):
            error = result.errors.get(request.request_id)
            if error is not None and request.status is RequestStatus.FINISHED:
                self.kv_cache_manager.forget(request.block_hashes)
            elif error is not None:
                self._fail(request)
                outputs.append(error_output(request, error, "the worker failed on it"))
        return outputs

    def _fail(self, request: Request) -> None:
        """End a request whose KV may be wrong: none of its blocks may be found by others."""
        beams = [request] if request.beam_group is None else request.beam_group.running
        for beam in beams:
            self.kv_cache_manager.forget(beam.block_hashes)
            beam.has_failed = True
        if request.beam_group is None:
            self.finish(request)
        else:
            self.finish_group(request.beam_group)

    # Ends

    def finish(self, request: Request) -> None:
        """The only way out: blocks, row and place in the queue are given up together."""
        self.release(request)
        self.waiting.charge(request)
        request.move_to(RequestStatus.FINISHED)
        del self.requests[request.request_id]

    def release(self, request: Request) -> None:
        """Take back all that a live request has: blocks of either tier and row, or its place in the queue."""
        if request.status is RequestStatus.RUNNING:
            self.leave_running(request)
            self.register_blocks(request)
            self.kv_cache_manager.free(request.request_id)
        else:
            self.waiting.remove(request)
            if request.status is RequestStatus.SWAPPED:
                self.kv_cache_manager.free_host(request.request_id)

    def finish_group(self, group: BeamGroup) -> None:
        """End a beam search and all its beams."""
        del self.beam_groups[group.request_id]
        for beam in group.running:
            self.finish(beam)
        group.running.clear()  # a reference cycle less for the collector

    # What others may know

    def stats(self) -> EngineStats:
        """The state right now."""
        return read_stats(self)

    def check_idle(self) -> None:
        """Raise InvariantError when no step is in flight and yet something is held or waits. O(1)."""
        if not self.steps_in_flight:
            manager = self.kv_cache_manager
            num_held_blocks = manager.num_used_blocks + manager.host_pool.num_held_blocks
            require(not self.requests, f"{len(self.requests)} requests, but no step in flight")
            require(num_held_blocks == 0, "blocks are held though there is no request")
