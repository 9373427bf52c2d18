"""Blocks of a GGUF file to fp32, a few thousand at a time so that the temporaries stay in the caches.

The layouts are ggml's: a block holds 32 weights of a row behind their scale (and minimum), both fp16; a 4-bit byte
holds weight i in its low and weight i + 16 in its high half. Invariant: the values are bit for bit those of the `gguf`
library, which a test compares; the common types are done here because torch is several times faster at it, every other
type that the library knows goes through the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

WEIGHTS_PER_BLOCK = 32
BLOCKS_PER_CHUNK = 1 << 16
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class BlockLayout(NamedTuple):
    """Weights and bytes of one block."""

    num_weights: int
    num_bytes: int


def _scales(blocks: torch.Tensor, num_scales: int) -> torch.Tensor:
    """Return fp32 [N, num_scales], from the fp16 numbers at the start of each block."""
    return blocks[:, : 2 * num_scales].contiguous().view(torch.float16).float()


def _unpack_nibbles(blocks: torch.Tensor, first_byte: int, out: torch.Tensor) -> None:
    packed = blocks[:, first_byte:].contiguous()
    halves = out.view(-1, 2, WEIGHTS_PER_BLOCK // 2)
    halves[:, 0].copy_(packed & 15)
    halves[:, 1].copy_(packed >> 4)


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _unpack_nibbles(blocks, 2, out)
    out.sub_(8).mul_(_scales(blocks, 1))


def _q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scale, minimum = _scales(blocks, 2).split(1, dim=1)
    _unpack_nibbles(blocks, 4, out)
    out.mul_(scale).add_(minimum)


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    torch.mul(blocks[:, 2:].view(torch.int8), _scales(blocks, 1), out=out)


DEQUANTIZERS: dict[str, tuple[BlockLayout, Callable[[torch.Tensor, torch.Tensor], None]]] = {
    "Q4_0": (BlockLayout(WEIGHTS_PER_BLOCK, 18), _q4_0),
    "Q4_1": (BlockLayout(WEIGHTS_PER_BLOCK, 20), _q4_1),
    "Q8_0": (BlockLayout(WEIGHTS_PER_BLOCK, 34), _q8_0),
}


def block_layout(quantization: str) -> BlockLayout | None:
    """Return the layout of a GGUF type, or None when nothing here can read it."""
    if dtype := PLAIN_DTYPES.get(quantization):
        return BlockLayout(1, dtype.itemsize)
    if known := DEQUANTIZERS.get(quantization):
        return known[0]
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants  # rarely needed, and slow to import

    quantization_type = GGMLQuantizationType.__members__.get(quantization)
    if quantization_type is None or quantization_type not in quants._type_traits:
        return None
    return BlockLayout(*GGML_QUANT_SIZES[quantization_type])


def dequantize(data: torch.Tensor, quantization: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the weights.

    Args:
        data: uint8 [num_bytes], whole blocks; their number must be what `shape` needs.
        quantization: GGUF type for which `block_layout` returns a layout.
        shape: of the result, row-major.

    Returns:
        `shape`, of the stored dtype for F32, F16 and BF16 (then sharing memory with `data`), else fp32.
    """
    if dtype := PLAIN_DTYPES.get(quantization):
        return data.view(dtype).view(shape)
    if quantization not in DEQUANTIZERS:
        return _dequantize_by_library(data, quantization, shape)
    layout, dequantize_blocks = DEQUANTIZERS[quantization]
    blocks = data.view(-1, layout.num_bytes)
    weights = torch.empty(len(blocks), layout.num_weights, dtype=torch.float32)
    for chunk, out in zip(blocks.split(BLOCKS_PER_CHUNK), weights.split(BLOCKS_PER_CHUNK), strict=True):
        dequantize_blocks(chunk, out)
    return weights.view(shape)


def _dequantize_by_library(data: torch.Tensor, quantization: str, shape: tuple[int, ...]) -> torch.Tensor:
    from gguf import GGMLQuantizationType, quants

    rows = data.numpy().reshape(*shape[:-1], -1)
    return torch.from_numpy(quants.dequantize(rows, GGMLQuantizationType[quantization])).view(shape)
