"""One step while it is being decided.

Invariant: the token budget never goes below zero, and a request's lengths move on in the moment in which it gets its
tokens: workers execute steps strictly in order, so what is scheduled counts as computed for every later decision.
A plan is open until something is scheduled: what was dropped meanwhile goes with the next step.
"""

from __future__ import annotations

from octavo.engine_core.request import Request
from octavo.engine_core.steady_set import SteadySet
from octavo.protocol.config import SchedulerConfig
from octavo.protocol.worker_messages import BlockCopy, CachedRequest, NewRequest, SchedulerOutput


class StepPlan:
    """What the step will hold, and the token budget that is left.

    Attributes:
        scheduled: requests that are not steady and compute something.
        num_tokens: scheduled for requests that are not steady.
        sampling: requests of which the step samples a token, in batch order; complete once the plan is closed.
        num_steady_tokens: one for each steady request, once the plan is closed.
    """

    __slots__ = (
        "cached_requests",
        "config",
        "dropped_request_ids",
        "new_requests",
        "num_prefill_tokens",
        "num_scheduled_tokens",
        "num_steady_tokens",
        "num_tokens",
        "sampling",
        "scheduled",
        "steady",
        "steady_joined",
        "steady_left",
        "step_id",
    )

    def __init__(self, step_id: int, config: SchedulerConfig, steady: SteadySet) -> None:
        self.step_id = step_id
        self.config = config
        self.steady = steady
        self.num_tokens = 0
        self.num_prefill_tokens = 0
        self.num_steady_tokens = 0
        self.dropped_request_ids: list[str] = []
        self.new_requests: dict[str, NewRequest] = {}
        self.cached_requests: dict[str, CachedRequest] = {}
        self.steady_left: dict[str, None] = {}
        self.steady_joined: dict[str, None] = {}
        self.num_scheduled_tokens: dict[str, int] = {}
        self.scheduled: list[Request] = []
        self.sampling: list[Request] = []

    @property
    def token_budget(self) -> int:
        """Tokens that may still be scheduled; every steady request has its one already."""
        return self.config.max_num_batched_tokens - len(self.steady) - self.num_tokens

    @property
    def is_empty(self) -> bool:
        return not self.num_tokens and not self.steady

    def num_tokens_for(self, request: Request) -> int:
        """Tokens that the request gets: all that it lacks, within token budget, chunk and prefill share."""
        num_missing_tokens = request.num_missing_tokens
        if num_missing_tokens == 1:
            return min(1, self.token_budget)
        num_tokens = min(num_missing_tokens, self.token_budget, self.config.max_tokens_per_request or self.token_budget)
        if self.steady and self.config.max_prefill_share < 1:
            share = max(1, int(self.config.max_prefill_share * self.config.max_num_batched_tokens))
            num_tokens = min(num_tokens, share - self.num_prefill_tokens)
        return max(0, num_tokens)

    def schedule(self, request: Request, num_tokens: int) -> bool:
        """Give the request `num_tokens` tokens; when that reaches the last one, its next token is pending.

        A beam's next token is chosen here, not sampled: it is not pending, it does not exist yet. Returns whether
        the request has caught up.
        """
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.scheduled.append(request)
        self.num_tokens += num_tokens
        if request.num_missing_tokens > 1:
            self.num_prefill_tokens += num_tokens
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens < request.num_tokens:
            return False
        self.sampling.append(request)
        if request.beam_group is None:
            request.num_tokens += 1
        return True

    def add_row(self, request: Request, block_ids: list[int]) -> None:
        """Have the workers make or replace a row. Lists are copied: the message is a value, the request goes on."""
        request.has_row = True
        request.unsent_token_ids.clear()
        self.new_requests[request.request_id] = NewRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids.copy(),
            sampling_params=request.sampling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
        )

    def grow_row(self, request: Request, new_block_ids: list[int]) -> None:
        """Have the workers append to the row."""
        new_token_ids = request.unsent_token_ids.copy()
        request.unsent_token_ids.clear()
        self.cached_requests[request.request_id] = CachedRequest(request.request_id, new_block_ids, new_token_ids)

    def drop_row(self, request: Request) -> None:
        """Have the workers forget the row, if they have one, and take back what this plan says about it."""
        self.cached_requests.pop(request.request_id, None)
        self.steady_joined.pop(request.request_id, None)
        self.steady_left.pop(request.request_id, None)
        if request.has_row:
            request.has_row = False
            self.dropped_request_ids.append(request.request_id)

    def close(self, copies: list[BlockCopy]) -> SchedulerOutput:
        """The step as the workers get it. Every steady request has one more token computed, and one more pending."""
        self.num_steady_tokens = len(self.steady)
        self.sampling = [*self.steady.members.values(), *self.sampling]
        self.steady.advance()
        return SchedulerOutput(
            step_id=self.step_id,
            dropped_request_ids=self.dropped_request_ids,
            copies=copies,
            new_requests=list(self.new_requests.values()),
            cached_requests=list(self.cached_requests.values()),
            steady_left=list(self.steady_left),
            steady_joined=list(self.steady_joined),
            num_scheduled_tokens=self.num_scheduled_tokens,
        )
