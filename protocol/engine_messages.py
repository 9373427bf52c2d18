"""What crosses the border between API servers and the engine core.

Read this file to know the whole contract. Fields are positional on the wire: append only, with a default.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from octavo.protocol.sampling_params import SamplingParams

PROTOCOL_VERSION = 1


class FinishReason(StrEnum):
    """Why a request ended. STOP: EOS, a stop token or a stop string; LENGTH: max_tokens or the context is full."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorCode(StrEnum):
    """Why a request ended with FinishReason.ERROR."""

    NEVER_FITS = "never_fits"
    NUMERICAL_ERROR = "numerical_error"
    INTERNAL_ERROR = "internal_error"


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of everything on the wire."""


class Hello(Message, frozen=True):
    """API server -> engine core, first message: asks for EngineReady."""

    protocol_version: int = PROTOCOL_VERSION


class AddRequest(Message, frozen=True):
    """API server -> engine core: a new request, or a live one sent again with its output so far.

    `arrival_time_s` (monotonic clock of the machine) orders the waiting queue: a request that is sent again keeps the
    time that it had.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time_s: float
    output_token_ids: list[int] = msgspec.field(default_factory=list)
    priority: int = 0


class AbortRequests(Message, frozen=True):
    """API server -> engine core. Idempotent: unknown and finished ids are ignored; aborted requests answer nothing."""

    request_ids: list[str]


class EngineReady(Message, frozen=True):
    """Engine core -> API server, as the answer to Hello once every worker is ready."""

    protocol_version: int
    block_size: int
    num_device_blocks: int
    max_model_len: int


class RequestOutput(Message, frozen=True):
    """New output of one request. The receiver appends `token_ids` at `first_index` and drops what it already has.

    With FinishReason.STOP, `stop_token_id` is the last of the output tokens, the EOS or stop token that ended it.
    """

    request_id: str
    first_index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: ErrorCode | None = None
    error_message: str = ""


class EngineStats(Message, frozen=True):
    """State of the engine core after a step or a change; counters count since the engine core started."""

    num_running_requests: int
    num_waiting_requests: int
    num_used_blocks: int
    num_total_blocks: int
    num_steps: int
    num_scheduled_tokens: int
    num_preemptions: int


class EngineOutput(Message, frozen=True):
    """Engine core -> API server: the outputs of one update for that API server, and the state after it."""

    outputs: list[RequestOutput]
    stats: EngineStats


EngineCommand = Hello | AddRequest | AbortRequests
EngineEvent = EngineReady | EngineOutput
