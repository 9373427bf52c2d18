"""How long a device takes for a step.

    step = overhead + copies between the tiers + copies on the device + linear layers + attention
    linear layers = max(their weights read once, flops of all tokens, and of those that sample with the output head)
    attention = max(KV of every request read once, flops of every token with its context)

Copies come first and are not overlapped, as the protocol orders them. A roofline per kind of layer, not one for the
whole step: the two kinds run one after the other, so the memory time of one does not hide behind the arithmetic of the
other. Left out: KV writes and activations; they are small. Several devices are one device with the sum of their
speeds: communication is free, so their figures are an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.simulator.devices import Device, Model

MEMORY_UTILIZATION = 0.9  # of the device's memory, for weights and KV


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step does.

    Attributes:
        num_tokens: tokens computed.
        num_sampled_tokens: tokens sampled.
        num_kv_tokens: tokens whose KV is read, once for each request of the step.
        num_attention_pairs: (token, token of its context) over all computed tokens, itself included.
        num_link_copies: blocks copied between the tiers.
        num_device_copies: blocks copied on the device.
    """

    num_tokens: int
    num_sampled_tokens: int
    num_kv_tokens: int
    num_attention_pairs: int
    num_link_copies: int = 0
    num_device_copies: int = 0


def attention_pairs(num_context_tokens: int, num_tokens: int) -> int:
    """Pairs of `num_tokens` new tokens with all before them: `num_context_tokens`, then each other."""
    return num_tokens * num_context_tokens + num_tokens * (num_tokens + 1) // 2


class CostModel:
    """Step times of `num_devices` devices that share one model."""

    def __init__(self, device: Device, model: Model, block_size: int, num_devices: int = 1) -> None:
        self.model = model
        self.block_bytes = block_size * model.kv_bytes_per_token
        self.host_s = device.host_s
        self._memory_bytes = num_devices * device.memory_bytes
        self._overhead_s = device.step_overhead_s
        self._memory_bytes_per_s = num_devices * device.memory_bytes_per_s * device.memory_share
        self._flops_per_s = num_devices * device.flops_per_s * device.compute_share
        self._link_bytes_per_s = num_devices * device.link_bytes_per_s * device.link_share

    def step_s(self, load: StepLoad) -> float:
        """Device time of one step."""
        model = self.model
        copies_s = self.block_bytes * (
            load.num_link_copies / self._link_bytes_per_s
            + 2 * load.num_device_copies / self._memory_bytes_per_s  # read and written
        )
        num_products = load.num_tokens * model.num_layer_params + load.num_sampled_tokens * model.num_head_params
        linear_s = max(model.read_bytes / self._memory_bytes_per_s, 2 * num_products / self._flops_per_s)
        attention_s = max(
            load.num_kv_tokens * model.kv_bytes_per_token / self._memory_bytes_per_s,
            load.num_attention_pairs * model.attention_flops_per_pair / self._flops_per_s,
        )
        return self._overhead_s + copies_s + linear_s + attention_s

    def num_device_blocks(self) -> int:
        """Blocks that fit beside the weights. Raises ValueError when there is no room for any."""
        free_bytes = MEMORY_UTILIZATION * self._memory_bytes - self.model.weight_bytes
        if free_bytes < self.block_bytes:
            raise ValueError("the weights leave no room for KV blocks: name a larger device or more --num-devices")
        return int(free_bytes // self.block_bytes)

    def copied_blocks_per_s(self) -> float:
        """What a worker would measure and report."""
        return self._link_bytes_per_s / self.block_bytes

    def prefill_tokens_per_s(self, num_tokens: int) -> float:
        """What a worker would measure with one large step of `num_tokens` tokens of one prompt."""
        return num_tokens / self.step_s(StepLoad(num_tokens, 1, num_tokens, attention_pairs(0, num_tokens)))
