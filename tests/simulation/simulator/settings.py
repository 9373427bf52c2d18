"""One simulation's settings. Everything that its report depends on is here, so that a report can be made again."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import Annotated

import msgspec

from octavo.api_server.client.shapes import Shape
from octavo.protocol.config import (
    AdmissionPolicy,
    CacheConfig,
    EngineConfig,
    Fraction,
    ModelConfig,
    Positive,
    PreemptionMode,
    SchedulerConfig,
    SchedulingPolicy,
    WeightsFormat,
)
from octavo.simulator.cost_model import CostModel
from octavo.simulator.devices import DEVICES, MODELS
from octavo.simulator.prompts import VOCAB_SIZE
from octavo.simulator.traces import capped, read_workload, scaled

Scale = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
NumBlocks = Annotated[int, msgspec.Meta(ge=1, le=10**8)]  # a list has an entry for each
NumHostBlocks = Annotated[int, msgspec.Meta(ge=0, le=10**8)]


class Reservation(StrEnum):
    """How much KV memory a request gets when it is admitted: blocks on demand, or one contiguous piece."""

    PAGED = "paged"  # our scheduler
    MAX = "max"  # as many slots as the longest request may have
    POW2 = "pow2"  # prompt, and the next power of two of the true output length
    ORACLE = "oracle"  # prompt and true output length


class Allocation(StrEnum):
    """Where a contiguous piece is put."""

    BUDDY = "buddy"  # powers of two, halved and joined again
    FIRST_FIT = "first-fit"  # the first hole that is large enough


class Batching(StrEnum):
    """When contiguous requests may join and leave."""

    CONTINUOUS = "continuous"  # after every step
    STATIC = "static"  # all together: a batch runs until its longest output ends


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """See the command line's help for what each one means; None takes the device's or the model's own value."""

    trace: str
    num_requests: Positive | None = None
    rate_scale: Scale = 1.0
    length_scale: Scale = 1.0
    is_saturated: bool = False
    device: str = "h100"
    num_devices: Positive = 1
    model: str = "llama-8b"
    max_model_len: Positive | None = None
    max_tokens: Positive | None = None
    num_device_blocks: NumBlocks | None = None
    num_host_blocks: NumHostBlocks = 0
    block_size: Positive = 16
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive | None = None
    max_prefill_share: Fraction = SchedulerConfig().max_prefill_share
    max_steps_in_flight: Positive = SchedulerConfig().max_steps_in_flight
    admission_policy: AdmissionPolicy = SchedulerConfig().admission_policy
    preemption_mode: PreemptionMode = SchedulerConfig().preemption_mode
    scheduling_policy: SchedulingPolicy = SchedulerConfig().scheduling_policy
    enable_prefix_caching: bool = True
    reservation: Reservation = Reservation.PAGED
    allocation: Allocation = Allocation.BUDDY
    batching: Batching = Batching.CONTINUOUS


class Setup:
    """What follows from the settings.

    Attributes:
        num_device_blocks: of the pool; contiguous policies get one region of as many slots.
        max_model_len: the model's, unless set, but never more than the pool holds.
    """

    def __init__(self, settings: Settings) -> None:
        """Raise ValueError when the settings do not fit each other."""
        device, model = DEVICES[settings.device], MODELS[settings.model]
        self.settings = settings
        self.cost_model = CostModel(device, model, settings.block_size, settings.num_devices)
        self.num_device_blocks = settings.num_device_blocks or self.cost_model.num_device_blocks()
        self.max_num_batched_tokens = settings.max_num_batched_tokens or device.max_num_batched_tokens
        num_slots = self.num_device_blocks * settings.block_size
        self.max_model_len = min(settings.max_model_len or model.max_model_len, num_slots)
        if self.max_model_len < 2:
            raise ValueError("max_model_len must leave room for a prompt and an output: at least 2 tokens")

    def shapes(self) -> list[Shape]:
        """The requests by arrival, with lengths as they will come out."""
        settings = self.settings
        time_scale = 0.0 if settings.is_saturated else 1 / settings.rate_scale
        shapes = [
            capped(scaled(shape, settings.length_scale, time_scale), self.max_model_len)
            for shape in read_workload(settings.trace, settings.num_requests)
        ]
        if settings.max_tokens is None:
            return shapes
        return [replace(shape, num_output_tokens=min(shape.num_output_tokens, settings.max_tokens)) for shape in shapes]

    def max_tokens_of(self, num_prompt_tokens: int) -> int:
        """Output length that a request with this prompt asks for at most; the scheduler knows no better."""
        room = self.max_model_len - num_prompt_tokens
        return min(room, self.settings.max_tokens) if self.settings.max_tokens else room

    def engine_config(self) -> EngineConfig:
        """The configuration that the scheduler is made with."""
        settings = self.settings
        return EngineConfig(
            model=ModelConfig(
                path=settings.model,
                weights_path=settings.model,
                weights_format=WeightsFormat.SAFETENSORS,
                served_model_names=(settings.model,),
                max_model_len=self.max_model_len,
                vocab_size=VOCAB_SIZE,
            ),
            ipc_directory="",
            cache=CacheConfig(
                block_size=settings.block_size,
                num_device_blocks=self.num_device_blocks,
                num_host_blocks=settings.num_host_blocks,
                enable_prefix_caching=settings.enable_prefix_caching,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_prefill_share=settings.max_prefill_share,
                max_steps_in_flight=settings.max_steps_in_flight,
                admission_policy=settings.admission_policy,
                preemption_mode=settings.preemption_mode,
                scheduling_policy=settings.scheduling_policy,
            ),
        )
