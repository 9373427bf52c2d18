"""Which class builds which architecture.

The names alone, which need no torch, are `models.config.SUPPORTED_ARCHITECTURES`; a test keeps the two equal.
"""

from __future__ import annotations

import torch

from octavo.worker.distributed import SINGLE_RANK, TensorParallelGroup
from octavo.worker.layers.linear_weight import BlockFormatOf, WeightFactory
from octavo.worker.layers.weight_memory import WeightMemory
from octavo.worker.models.config import LlamaConfig
from octavo.worker.models.llama import LlamaForCausalLM

ARCHITECTURES = {"LlamaForCausalLM": LlamaForCausalLM}


def build_model(
    config: LlamaConfig,
    num_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorParallelGroup = SINGLE_RANK,
    block_format_of: BlockFormatOf | None = None,
) -> LlamaForCausalLM:
    """Return this rank's share of the model with unset weights; on the meta device it takes no memory.

    `block_format_of` chooses the formats of packed weights; without it all weights are plain tensors.
    """
    make = WeightFactory(dtype, device, WeightMemory(device), block_format_of)
    return ARCHITECTURES[config.architecture](config, num_positions, make, group)
