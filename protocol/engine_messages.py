"""What crosses the border between API servers and the engine core.

Read this file to know the whole contract. Fields are positional on the wire: append only, with a default.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from octavo.protocol.logprobs import PromptLogprobs, TokenLogprobs
from octavo.protocol.sampling_params import SamplingParams

PROTOCOL_VERSION = 3
MAX_NUM_BEAMS = 64
MAX_LENGTH_PENALTY = 10.0


class FinishReason(StrEnum):
    """Why a request ended. STOP: EOS, a stop token or a stop string; LENGTH: max_tokens or the context is full."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorCode(StrEnum):
    """Why a request ended with FinishReason.ERROR.

    NOTHING_ALLOWED: its own options forbade every token; GRAMMAR_FAILED: its grammar became too large to follow.
    """

    NEVER_FITS = "never_fits"
    NUMERICAL_ERROR = "numerical_error"
    NOTHING_ALLOWED = "nothing_allowed"
    INTERNAL_ERROR = "internal_error"
    GRAMMAR_FAILED = "grammar_failed"


class EarlyStopping(StrEnum):
    """When a beam search ends; see `BeamSearchParams.early_stopping`."""

    ALWAYS = "always"
    HEURISTIC = "heuristic"
    NEVER = "never"


class BeamSearchParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How one prompt is searched with beams. The meaning of each field is that of transformers' `generate`.

    Attributes:
        num_beams: beams that are kept at each length.
        num_choices: finished beams that are answered, best first; at most `num_beams`.
        length_penalty: a finished beam scores (sum of its logprobs) / (its output length ** length_penalty).
        early_stopping: ALWAYS ends when `num_beams` beams have finished (`True` there); HEURISTIC when no running
            beam can beat the worst finished one at its present length (`False`); NEVER also considers lengths to come.
    """

    num_beams: int
    num_choices: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    def __post_init__(self) -> None:
        """Raise ValueError whose text starts with the name of the first field that is out of range."""
        if not 1 <= self.num_beams <= MAX_NUM_BEAMS:
            raise ValueError(f"num_beams must be in [1, {MAX_NUM_BEAMS}], got {self.num_beams!r}")
        if not 1 <= self.num_choices <= self.num_beams:
            raise ValueError(f"num_choices must be between 1 and num_beams, got {self.num_choices!r}")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise ValueError(f"length_penalty must be in ±{MAX_LENGTH_PENALTY}, got {self.length_penalty!r}")


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of everything on the wire."""


class Hello(Message, frozen=True):
    """API server -> engine core, first message: asks for EngineReady."""

    protocol_version: int = PROTOCOL_VERSION


class AddRequest(Message, frozen=True):
    """API server -> engine core: a new request, or a live one sent again with its output so far.

    Attributes:
        arrival_time_s: monotonic clock of the machine; orders the waiting queue. A request that is sent again keeps
            the time that it had.
        priority: lower goes first; only with the scheduling policy `priority`.
        cache_salt: KV blocks are shared only among requests of equal salt.
        tenant, tenant_weight: whose request it is, and the tenant's share of the tokens relative to other tenants.
        fork_of: request_id of another choice of the same prompt, added before, whose KV blocks this one shares.
        beam_search: search with beams instead of sampling; then the one RequestOutput carries `beams`.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time_s: float
    output_token_ids: list[int] = msgspec.field(default_factory=list)
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    tenant_weight: int = 1
    fork_of: str = ""
    beam_search: BeamSearchParams | None = None


class AbortRequests(Message, frozen=True):
    """API server -> engine core. Idempotent: unknown and finished ids are ignored; aborted requests answer nothing."""

    request_ids: list[str]


class EngineReady(Message, frozen=True):
    """Engine core -> API server, as the answer to Hello once every worker is ready."""

    protocol_version: int
    block_size: int
    num_device_blocks: int
    max_model_len: int


class BeamOutput(Message, frozen=True):
    """One finished beam: its output with the token that ended it, and its score (see `BeamSearchParams`)."""

    token_ids: list[int]
    score: float
    finish_reason: FinishReason
    stop_token_id: int | None = None


class RequestOutput(Message, frozen=True):
    """New output of one request. The receiver appends `token_ids` at `first_index` and drops what it already has.

    With FinishReason.STOP, `stop_token_id` is the last of the output tokens, the EOS or stop token that ended it.
    `num_cached_tokens` counts the prompt tokens whose KV was there when the request was first admitted. A beam search
    has one output, at its end, with `num_choices` beams, best first, and no `token_ids`. `logprobs` has a row for each
    of `token_ids` when the request asked for them. `prompt_logprobs` may come in several outputs, before or with the
    first token; rows that come again after a preemption or a restart are the same.
    """

    request_id: str
    first_index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: ErrorCode | None = None
    error_message: str = ""
    beams: list[BeamOutput] = msgspec.field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


class EngineStats(Message, frozen=True):
    """State of the engine core after a step or a change; counters count since the engine core started.

    Attributes:
        num_waiting_requests: all that hold no device blocks, swapped ones included.
        num_used_blocks: device blocks that a request holds; cached ones that nobody holds are not among them.
        num_cached_blocks: device blocks that nobody holds and whose content may still be shared.
        num_used_host_blocks: host blocks that a swapped request holds.
        num_prompt_tokens, num_cached_tokens: of admitted requests (each once): all, and those found in the cache.
        num_recomputed_tokens: tokens scheduled again because of a preemption.
        num_swapped_out_blocks, num_swapped_in_blocks: block copies between the tiers, offload included.
    """

    num_running_requests: int
    num_waiting_requests: int
    num_used_blocks: int
    num_total_blocks: int
    num_steps: int
    num_scheduled_tokens: int
    num_preemptions: int
    num_swapped_requests: int = 0
    num_cached_blocks: int = 0
    num_used_host_blocks: int = 0
    num_total_host_blocks: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0


class EngineOutput(Message, frozen=True):
    """Engine core -> API server: the outputs of one update for that API server, and the state after it."""

    outputs: list[RequestOutput]
    stats: EngineStats


EngineCommand = Hello | AddRequest | AbortRequests
EngineEvent = EngineReady | EngineOutput
