"""One generation job inside the engine core: its lengths, its status, its end.

Only the scheduler changes a request. The lengths of a request are ordered at all times:

    0 <= num_computed_tokens <= num_tokens <= max_num_tokens
    num_tokens = num_prompt_tokens + num_output_tokens + num_pending_tokens

A token is pending between the schedule of the step that samples it and the arrival of that step's result: it exists
for the scheduler, which may already schedule its computation, but its value is only known to the workers. Rejected:
a class per status (an enum and a table of legal transitions say the same in ten lines), and copies of sampling fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import isfinite

from octavo.engine_core.invariants import require
from octavo.protocol.config import ModelConfig
from octavo.protocol.engine_messages import AddRequest, FinishReason

OrderKey = tuple[int, float, int]


class RequestStatus(Enum):
    """WAITING: holds no blocks. RUNNING: holds blocks and has a row on the workers. FINISHED: is forgotten."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


LEGAL_TRANSITIONS = {
    RequestStatus.WAITING: (RequestStatus.RUNNING, RequestStatus.FINISHED),
    RequestStatus.RUNNING: (RequestStatus.WAITING, RequestStatus.FINISHED),
    RequestStatus.FINISHED: (),
}


def why_malformed(command: AddRequest, vocab_size: int) -> str | None:
    """What is wrong with a request that should have been checked before it came here; None when it is sound.

    The API server checks all that clients send. This second look is at the little that would hurt every request, not
    only this one: ids that no worker can look up, and a time that has no place in the order.
    """
    if not command.prompt_token_ids:
        return "the prompt has no tokens"
    if not _are_token_ids(command.prompt_token_ids, vocab_size):
        return f"prompt_token_ids must be in [0, {vocab_size})"
    if not _are_token_ids(command.output_token_ids, vocab_size):
        return f"output_token_ids must be in [0, {vocab_size})"
    if not isfinite(command.arrival_time_s):
        return "arrival_time_s must be finite"
    return None


def _are_token_ids(token_ids: Sequence[int], vocab_size: int) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)


class Request:
    """State of one request.

    Attributes:
        order: sort key of every queue: lower priority value first, then earlier arrival, then who came in first.
        num_tokens: tokens known or pending.
        num_computed_tokens: tokens whose KV is valid, or will be once the steps in flight have run.
        max_num_tokens: tokens at which the request ends with FinishReason.LENGTH.
        stop_token_ids: ids that end it with FinishReason.STOP; for look-up only.
    """

    __slots__ = (
        "max_num_tokens",
        "num_computed_tokens",
        "num_tokens",
        "order",
        "output_token_ids",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "status",
        "stop_token_ids",
    )

    def __init__(self, command: AddRequest, sequence_number: int, model: ModelConfig) -> None:
        params = command.sampling_params
        eos_token_ids = () if params.ignore_eos else model.eos_token_ids
        self.request_id = command.request_id
        self.prompt_token_ids = command.prompt_token_ids
        self.output_token_ids = list(command.output_token_ids)
        self.sampling_params = params
        self.order: OrderKey = (command.priority, command.arrival_time_s, sequence_number)
        self.status = RequestStatus.WAITING
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)
        self.num_computed_tokens = 0
        self.max_num_tokens = min(len(self.prompt_token_ids) + params.max_tokens, model.max_model_len)
        self.stop_token_ids = frozenset((*eos_token_ids, *params.stop_token_ids))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        return self.num_tokens - len(self.prompt_token_ids) - len(self.output_token_ids)

    @property
    def max_num_kv_tokens(self) -> int:
        """Most token slots that the request ever fills: the last token that it samples is never computed."""
        return self.max_num_tokens - 1

    def finish_reason(self) -> FinishReason | None:
        """Why the request ends with its last output token; None when it goes on.

        The token at output index i may stop the request from i = min_tokens on, the index from which the worker may
        sample it. A token that both stops and fills up counts as a stop.
        """
        num_output_tokens = len(self.output_token_ids)
        if num_output_tokens > self.sampling_params.min_tokens and self.output_token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if len(self.prompt_token_ids) + num_output_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH
        return None

    def move_to(self, status: RequestStatus) -> None:
        """Change the status; raise InvariantError when the table does not allow it."""
        require(status in LEGAL_TRANSITIONS[self.status], f"{self.status} -> {status} of {self.request_id}")
        self.status = status
