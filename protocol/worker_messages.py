"""What crosses the border between the engine core and the workers.

A worker executes SchedulerOutputs strictly in the order in which they come, one after the other; so a block that was
freed and given away at step n+1 is never written by a later part of step n. Fields are positional: append only, with
a default.
"""

from __future__ import annotations

import msgspec

from octavo.protocol.engine_messages import ErrorCode, Message
from octavo.protocol.sampling_params import SamplingParams


class WorkerReady(Message, frozen=True):
    """Worker -> engine core, once: its memory is allocated and it takes steps."""

    rank: int
    num_device_blocks: int
    num_host_blocks: int = 0


class NewRequest(Message, frozen=True):
    """The full state of a request that gets a row: at admission, or when it resumes after a preemption."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int


class CachedRequest(Message, frozen=True):
    """The delta for a request that has a row: block ids to append to its block table."""

    request_id: str
    new_block_ids: list[int]


class SchedulerOutput(Message, frozen=True):
    """Engine core -> every worker: one step. Apply the fields in their order, then run the model.

    For each request the worker computes the next `num_scheduled_tokens` tokens after those already computed. When
    that reaches the last known token, it samples one more token, appends it to the row and reports it.

    Attributes:
        dropped_request_ids: rows to forget: finished, aborted or preempted requests.
        swap_out: (device block, host block) copies, before anything overwrites the device block.
        swap_in: (host block, device block) copies.
        new_requests: requests that get a row.
        cached_requests: requests with a row whose block table grew.
        num_scheduled_tokens: request_id -> tokens to compute, in batch order.
    """

    step_id: int
    dropped_request_ids: list[str]
    swap_out: list[tuple[int, int]]
    swap_in: list[tuple[int, int]]
    new_requests: list[NewRequest]
    cached_requests: list[CachedRequest]
    num_scheduled_tokens: dict[str, int]


class ModelRunnerOutput(Message, frozen=True):
    """Rank 0 -> engine core: the result of one step.

    Attributes:
        sampled_token_ids: request_id -> tokens sampled at this step; absent for a request whose chunk did not reach
            its last token.
        errors: requests that failed alone at this step; they have no sampled token.
    """

    step_id: int
    sampled_token_ids: dict[str, list[int]]
    errors: dict[str, ErrorCode] = msgspec.field(default_factory=dict)


WorkerEvent = WorkerReady | ModelRunnerOutput
