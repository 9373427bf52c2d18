"""The wire: every message survives a round trip, and nothing else gets through."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.protocol import codec
from octavo.protocol.config import EngineConfig, ModelConfig, WeightsFormat
from octavo.protocol.engine_messages import (
    AbortRequests,
    AddRequest,
    BeamOutput,
    BeamSearchParams,
    EngineOutput,
    EngineReady,
    EngineStats,
    ErrorCode,
    FinishReason,
    Hello,
    RequestOutput,
)
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import (
    NO_TOKEN,
    CachedRequest,
    Candidates,
    CopyKind,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    WorkerReady,
)

PARAMS = SamplingParams(max_tokens=7, seed=2**63 - 1, stop_token_ids=(1, 2))
STATS = EngineStats(1, 2, 3, 4, 5, 6, 7)
SCHEDULER_OUTPUT = SchedulerOutput(
    step_id=3,
    dropped_request_ids=["a"],
    copies=[(CopyKind.SWAP_OUT, 1, 2), (CopyKind.SWAP_IN, 2, 1), (CopyKind.DEVICE, 3, 4)],
    new_requests=[NewRequest("b", [1, 2], [3], PARAMS, [4], 0)],
    cached_requests=[CachedRequest("c", [5], [6])],
    steady_left=["d"],
    steady_joined=["e"],
    num_scheduled_tokens={"c": 1, "b": 3},
)

ROUND_TRIPS = [
    (codec.decode_engine_command, Hello()),
    (codec.decode_engine_command, AddRequest("r", [1], PARAMS, 0.5, [9])),
    (codec.decode_engine_command, AddRequest("r", [1], PARAMS, 0.5, beam_search=BeamSearchParams(4, 2, 0.5))),
    (codec.decode_engine_command, AbortRequests(["r"])),
    (codec.decode_engine_event, EngineReady(1, 16, 100, 2048)),
    (
        codec.decode_engine_event,
        EngineOutput([RequestOutput("r", 2, [5], FinishReason.ERROR, None, 0, ErrorCode.NEVER_FITS, "why")], STATS),
    ),
    (
        codec.decode_engine_event,
        EngineOutput(
            [RequestOutput("r", 0, [], FinishReason.STOP, beams=[BeamOutput([4, 2], -0.5, FinishReason.STOP, 2)])],
            STATS,
        ),
    ),
    (codec.decode_scheduler_output, SCHEDULER_OUTPUT),
    (codec.decode_worker_event, WorkerReady(0, 100)),
    (
        codec.decode_worker_event,
        ModelRunnerOutput(
            3, [7, NO_TOKEN], {"c": ErrorCode.NUMERICAL_ERROR}, {"e": Candidates([1, 2], [-0.5, -1.5])}, [9]
        ),
    ),
]


@pytest.mark.parametrize(("decode", "message"), ROUND_TRIPS)
def test_round_trip(decode, message):
    assert decode(codec.encode(message)) == message


def test_batch_order_survives_the_wire():
    decoded = codec.decode_scheduler_output(codec.encode(SCHEDULER_OUTPUT))
    assert list(decoded.num_scheduled_tokens) == ["c", "b"]


@pytest.mark.parametrize(("decode", "message"), ROUND_TRIPS)
def test_a_message_of_another_direction_is_refused(decode, message):
    others = [other for other, _ in ROUND_TRIPS if other is not decode]
    for other in others:
        with pytest.raises(msgspec.MsgspecError):
            other(codec.encode(message))


@given(st.binary(max_size=200))
def test_garbage_raises_only_the_documented_error(frame):
    for decode in {decode for decode, _ in ROUND_TRIPS}:
        with pytest.raises(msgspec.MsgspecError):
            decode(frame)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_flipped_byte_never_raises_anything_else(position, value):
    frame = bytearray(codec.encode(SCHEDULER_OUTPUT))
    frame[position % len(frame)] = value
    with contextlib.suppress(msgspec.MsgspecError):
        codec.decode_scheduler_output(bytes(frame))


def test_config_round_trip_and_checks():
    model = ModelConfig(
        path="/m",
        weights_path="/m",
        weights_format=WeightsFormat.SAFETENSORS,
        served_model_names=("m",),
        max_model_len=128,
        vocab_size=64,
    )
    config = EngineConfig(model=model, ipc_directory="/run/octavo")
    assert codec.decode_config(codec.encode(config)) == config
    with pytest.raises(msgspec.ValidationError, match="block_size"):
        codec.decode_config(codec.encode({**msgspec.to_builtins(config), "cache": {"block_size": 0}}))
    with pytest.raises(msgspec.ValidationError, match="nonsense"):
        codec.decode_config(codec.encode({**msgspec.to_builtins(config), "nonsense": 1}))
