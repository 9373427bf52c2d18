"""What crosses the border between the engine core and the workers.

A worker executes SchedulerOutputs strictly in the order in which they come, one after the other; so a block that was
freed and given away at step n+1 is never written by a later part of step n. Fields are positional: append only, with
a default.

Most running requests are *steady*: each step computes their one new token, and nothing else about them changes. The
engine core and the workers both keep the list of steady requests, so a step names a request only when it joins or
leaves the list, gets blocks, or computes anything but that one token.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from octavo.protocol.engine_messages import ErrorCode, Message
from octavo.protocol.logprobs import PromptLogprobs, TokenLogprobs
from octavo.protocol.sampling_params import SamplingParams


class WorkerReady(Message, frozen=True):
    """Worker -> engine core, once: its memory is allocated and it takes steps.

    The speeds are what the worker measured at its start, 0 when it did not: blocks copied between the tiers per
    second, and tokens of a large step computed per second.
    """

    rank: int
    num_device_blocks: int
    num_host_blocks: int = 0
    copied_blocks_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


class WorkerHello(Message, frozen=True):
    """Worker -> engine core, its first word when there are several nodes; `agreement` says what it was started with."""

    rank: int
    agreement: dict[str, str]


class EngineHello(Message, frozen=True):
    """Engine core -> every worker, when all have said hello, or when some have not in time.

    Attributes:
        problem: why the start ends here, for the operator; empty when all nodes are there and agree.
        exit_code: that of the problem, an `ExitCode`.
    """

    problem: str = ""
    exit_code: int = 0


class NewRequest(Message, frozen=True):
    """The full state of a request that gets a row, or whose row is replaced.

    It gets one at admission, when it resumes after a preemption, and when a beam goes on from another beam. The KV of
    its first `num_computed_tokens` tokens is in its blocks already, or comes there by this step's copies, or, for
    blocks that it shares, by what this step computes for another request.
    """

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int


class CachedRequest(Message, frozen=True):
    """The delta for a request that has a row: block ids and token ids to append.

    Token ids come only for requests with `num_candidates`: their next token is chosen by the engine core.
    """

    request_id: str
    new_block_ids: list[int]
    new_token_ids: list[int] = msgspec.field(default_factory=list)


class CopyKind(IntEnum):
    """Where a block is copied from and to."""

    SWAP_OUT = 0  # device to host
    SWAP_IN = 1  # host to device
    DEVICE = 2  # device to device: copy on write


BlockCopy = tuple[CopyKind, int, int]  # kind, source block, destination block


class SchedulerOutput(Message, frozen=True):
    """Engine core -> every worker: one step. Apply the fields in their order, then run the model.

    For each request the worker computes the next tokens after those already computed: one for each steady request,
    `num_scheduled_tokens` for the others. When that reaches the last known token, it samples one more token, appends
    it to the row and reports it. Batch order: steady requests in the order in which they joined, then the others.

    Attributes:
        dropped_request_ids: rows to forget: finished, aborted or preempted requests; they are steady no more.
        copies: of whole blocks, with the effect of being done one after the other, all before the step computes.
        new_requests: requests that get a row.
        cached_requests: requests with a row that grew.
        steady_left: requests that keep their row but are not steady any more.
        steady_joined: requests that are steady from this step on; their row lacks exactly one token.
        num_scheduled_tokens: request_id -> tokens to compute, for requests that are not steady.
    """

    step_id: int
    dropped_request_ids: list[str]
    copies: list[BlockCopy]
    new_requests: list[NewRequest]
    cached_requests: list[CachedRequest]
    steady_left: list[str]
    steady_joined: list[str]
    num_scheduled_tokens: dict[str, int]


class Candidates(Message, frozen=True):
    """The likeliest next tokens of a request, likeliest first, and their logprobs (natural logarithm, no temperature).

    Tokens that `min_tokens` forbids are left out; equal logprobs stand in the order of the token ids.
    """

    token_ids: list[int]
    logprobs: list[float]


NO_TOKEN = -1


class ModelRunnerOutput(Message, frozen=True):
    """Rank 0 -> engine core: the result of one step.

    Attributes:
        sampled_token_ids: one for each request whose last known token this step computed, in batch order; NO_TOKEN
            where the request failed (now or before) or reports candidates.
        errors: requests that failed alone at this step.
        candidates: for the requests that asked for them.
        corrupt_block_ids: device blocks that this step copied in from the host and whose checksum was wrong.
        logprobs: one row for each request that asked for logprobs and got a token.
        prompt_logprobs: of the prompt tokens whose predecessors this step computed, for requests that asked.
    """

    step_id: int
    sampled_token_ids: list[int]
    errors: dict[str, ErrorCode] = msgspec.field(default_factory=dict)
    candidates: dict[str, Candidates] = msgspec.field(default_factory=dict)
    corrupt_block_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: dict[str, TokenLogprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = msgspec.field(default_factory=dict)


WorkerEvent = WorkerReady | ModelRunnerOutput | WorkerHello
