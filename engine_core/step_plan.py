"""One step while it is being decided.

Invariant: the token budget never goes below zero, and a request's lengths move on in the moment in which it gets its
tokens: workers execute steps strictly in order, so what is scheduled counts as computed for every later decision.
"""

from __future__ import annotations

from octavo.engine_core.request import Request
from octavo.protocol.worker_messages import CachedRequest, NewRequest, SchedulerOutput


class StepPlan:
    """What the step will hold, and the token budget that is left.

    Attributes:
        scheduled: requests of the step in batch order.
        sampling: those of them whose chunk reaches the last known token, so that the step samples one more.
    """

    __slots__ = (
        "cached_requests",
        "max_tokens_per_request",
        "new_requests",
        "num_scheduled_tokens",
        "sampling",
        "scheduled",
        "step_id",
        "token_budget",
    )

    def __init__(self, step_id: int, token_budget: int, max_tokens_per_request: int) -> None:
        self.step_id = step_id
        self.token_budget = token_budget
        self.max_tokens_per_request = max_tokens_per_request
        self.new_requests: list[NewRequest] = []
        self.cached_requests: list[CachedRequest] = []
        self.num_scheduled_tokens: dict[str, int] = {}
        self.scheduled: list[Request] = []
        self.sampling: list[Request] = []

    def num_tokens_for(self, request: Request) -> int:
        """Tokens that the request gets: all that it lacks, within the token budget and the chunk."""
        return min(request.num_tokens - request.num_computed_tokens, self.token_budget, self.max_tokens_per_request)

    def schedule(self, request: Request, num_tokens: int) -> None:
        """Give the request `num_tokens` tokens; when that reaches the last one, its next token is pending."""
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.token_budget -= num_tokens
        self.scheduled.append(request)
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == request.num_tokens:
            request.num_tokens += 1
            self.sampling.append(request)

    def add_row(self, request: Request, block_ids: list[int]) -> None:
        """Have the workers make a row. The lists are copied: the message is a value, the request goes on."""
        self.new_requests.append(
            NewRequest(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                output_token_ids=request.output_token_ids.copy(),
                sampling_params=request.sampling_params,
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
            )
        )

    def grow_row(self, request: Request, new_block_ids: list[int]) -> None:
        """Have the workers append to the row's block table."""
        self.cached_requests.append(CachedRequest(request.request_id, new_block_ids))

    def output(self, dropped_request_ids: list[str]) -> SchedulerOutput:
        """The step as the workers get it."""
        return SchedulerOutput(
            step_id=self.step_id,
            dropped_request_ids=dropped_request_ids,
            swap_out=[],
            swap_in=[],
            new_requests=self.new_requests,
            cached_requests=self.cached_requests,
            num_scheduled_tokens=self.num_scheduled_tokens,
        )
