"""One generation job inside the engine core: its lengths, its status, its end.

Only the scheduler changes a request. The lengths of a request are ordered at all times:

    0 <= num_computed_tokens <= num_tokens <= max_num_tokens
    num_tokens = num_prompt_tokens + num_output_tokens + num_pending_tokens

A token is pending between the schedule of the step that samples it and the arrival of that step's result: it exists
for the scheduler, which may already schedule its computation, but its value is only known to the workers. Rejected:
a class per status (an enum and a table of legal transitions say the same in ten lines), and copies of sampling fields.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from enum import Enum
from math import isfinite
from typing import TYPE_CHECKING

from octavo.engine_core.invariants import require
from octavo.protocol.config import ModelConfig
from octavo.protocol.engine_messages import AddRequest, FinishReason

if TYPE_CHECKING:
    from octavo.engine_core.beam_search import BeamGroup

OrderKey = tuple[int, float, int, int]


class RequestStatus(Enum):
    """WAITING: holds no blocks. RUNNING: holds device blocks. SWAPPED: holds host blocks. FINISHED: is forgotten."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


LEGAL_TRANSITIONS = {
    RequestStatus.WAITING: (RequestStatus.RUNNING, RequestStatus.FINISHED),
    RequestStatus.RUNNING: (RequestStatus.WAITING, RequestStatus.SWAPPED, RequestStatus.FINISHED),
    RequestStatus.SWAPPED: (RequestStatus.RUNNING, RequestStatus.FINISHED),
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
    if command.tenant_weight < 1:
        return "tenant_weight must be at least 1"
    if command.sampling_params.num_candidates:
        return "num_candidates is set by the engine core"
    if command.beam_search is not None and command.output_token_ids:
        return "a beam search starts without output"
    if command.beam_search is not None and command.sampling_params.grammar:
        return "a beam search follows no grammar"
    return None


def _are_token_ids(token_ids: Sequence[int], vocab_size: int) -> bool:
    try:
        array("I", token_ids)  # the quickest look for a negative one
    except OverflowError:
        return False
    return not token_ids or max(token_ids) < vocab_size


class Request:
    """State of one request.

    Attributes:
        order: sort key of every queue: lower priority value first, then earlier arrival, then who came in first, then
            the number of the beam.
        num_tokens: tokens known or pending.
        num_computed_tokens: tokens whose KV is valid, or will be once the steps in flight have run.
        max_num_tokens, max_num_output_tokens: tokens at which the request ends with FinishReason.LENGTH, in all and of
            output. Where the prompt fills the context, there is one of output, which is never computed.
        stop_token_ids: ids that end it with FinishReason.STOP; for look-up only.
        tenant, tenant_weight: whose request it is, and that tenant's share.
        fork_of, fork_of_order: id and order of the request whose prompt blocks it shares; "" for none.
        root_hash, block_hashes: names of its full blocks of known tokens, as far as they were needed.
        num_prompt_logprobs_left: prompt tokens whose logprobs it asked for and has not got.
        num_registered_blocks: blocks of its table, from the first, that can be found by their hash.
        was_admitted, num_cached_tokens: whether it ever ran; prompt tokens that were in the cache when it first did.
        num_preemptions, num_lost_tokens: how often it was preempted; computed tokens that it had the last time.
        has_failed: its KV may be wrong, and is not to be shared.
        has_row: whether the workers have a row of it.
        unsent_token_ids: tokens that were chosen here and that its row lacks.
        settled_at, due_at: of the `SteadySet`.
        beam_group: the search that it is a beam of.
    """

    __slots__ = (
        "beam_group",
        "block_hashes",
        "due_at",
        "fork_of",
        "fork_of_order",
        "has_failed",
        "has_row",
        "max_num_output_tokens",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_preemptions",
        "num_prompt_logprobs_left",
        "num_registered_blocks",
        "num_tokens",
        "order",
        "output_token_ids",
        "prompt_token_ids",
        "request_id",
        "root_hash",
        "sampling_params",
        "settled_at",
        "status",
        "stop_token_ids",
        "tenant",
        "tenant_weight",
        "unsent_token_ids",
        "was_admitted",
    )

    def __init__(self, command: AddRequest, order: OrderKey, model: ModelConfig, root_hash: bytes) -> None:
        params = command.sampling_params
        eos_token_ids = () if params.ignore_eos else model.eos_token_ids
        self.request_id = command.request_id
        self.prompt_token_ids = command.prompt_token_ids
        self.output_token_ids = list(command.output_token_ids)
        self.sampling_params = params
        self.order = order
        self.status = RequestStatus.WAITING
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)
        self.num_computed_tokens = 0
        num_prompt_tokens = len(self.prompt_token_ids)
        most_tokens = max(model.max_model_len, num_prompt_tokens + 1)
        self.max_num_tokens = min(num_prompt_tokens + params.max_tokens, most_tokens)
        self.max_num_output_tokens = self.max_num_tokens - num_prompt_tokens
        self.stop_token_ids = frozenset((*eos_token_ids, *params.stop_token_ids))
        self.tenant = command.tenant
        self.tenant_weight = command.tenant_weight
        self.fork_of = command.fork_of
        self.fork_of_order: OrderKey | None = None
        self.root_hash = root_hash
        self.block_hashes: list[bytes] = []
        self.num_prompt_logprobs_left = len(self.prompt_token_ids) - 1 if params.num_prompt_logprobs >= 0 else 0
        self.num_registered_blocks = 0
        self.was_admitted = False
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        self.has_failed = False
        self.has_row = False
        self.unsent_token_ids: list[int] = []
        self.settled_at = -1
        self.due_at = -1
        self.beam_group: BeamGroup | None = None

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

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that it has to compute."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether it has to compute its prompt from the first token; see `whole_prompt`."""
        return self.num_prompt_logprobs_left > 0

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions `start` to `stop` - 1; not to be changed."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if start == 0 and stop == num_prompt_tokens:
            return self.prompt_token_ids
        if stop <= num_prompt_tokens:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt_tokens:
            return self.output_token_ids[start - num_prompt_tokens : stop - num_prompt_tokens]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt_tokens]

    def is_same_prompt(self, other: Request) -> bool:
        """Whether the two may share the blocks of equal prompts."""
        return self.root_hash == other.root_hash and self.prompt_token_ids == other.prompt_token_ids

    def finish_reason(self) -> FinishReason | None:
        """Why the request ends with its last output token; None when it goes on.

        The token at output index i may stop the request from i = min_tokens on, the index from which the worker may
        sample it. A token that both stops and fills up counts as a stop.
        """
        num_output_tokens = len(self.output_token_ids)
        if num_output_tokens > self.sampling_params.min_tokens and self.output_token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        if num_output_tokens >= self.max_num_output_tokens:
            return FinishReason.LENGTH
        return None

    def start_over(self) -> Request:
        """The request as it would be if it had just come, with the output that it has; this one is finished.

        Results of steps in flight belong to the finished one, and so are dropped.
        """
        fresh = copy(self)
        fresh.status = RequestStatus.WAITING
        fresh.num_tokens = self.num_prompt_tokens + self.num_output_tokens
        fresh.num_computed_tokens = 0
        fresh.num_registered_blocks = 0
        fresh.has_row = fresh.has_failed = False
        fresh.unsent_token_ids = []
        self.status = RequestStatus.FINISHED
        return fresh

    def fork(self, request_id: str, number: int) -> Request:
        """A beam beside this one, without blocks: it gets its tokens from the search."""
        beam = copy(self)
        beam.request_id = request_id
        beam.order = (*self.order[:3], number)
        beam.status = RequestStatus.WAITING
        beam.num_registered_blocks = 0
        beam.has_row = False
        beam.unsent_token_ids = []
        return beam

    def move_to(self, status: RequestStatus) -> None:
        """Change the status; raise InvariantError when the table does not allow it."""
        require(status in LEGAL_TRANSITIONS[self.status], f"{self.status} -> {status} of {self.request_id}")
        self.status = status
