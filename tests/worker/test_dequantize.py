"""Blocks of every type: bit for bit what the `gguf` library gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from octavo.worker import dequantize as ours

SHAPE = (7, 3, 256)
FP16_HIGH_BYTES = {
    "Q4_0": [1],
    "Q4_1": [1, 3],
    "Q8_0": [1],
    "F16": [1],
    "BF16": [],
    "F32": [],
    "Q5_0": [1],
    "Q5_1": [1, 3],
    "Q6_K": [-1],
}


@pytest.mark.parametrize("quantization", FP16_HIGH_BYTES)
def test_values_equal_those_of_the_library(quantization, monkeypatch):
    monkeypatch.setattr(ours, "BLOCKS_PER_CHUNK", 10)  # several chunks, the last one short
    layout = ours.block_layout(quantization)
    generator = np.random.default_rng(0)
    num_blocks = int(np.prod(SHAPE)) // layout.num_weights
    data = generator.integers(0, 256, (num_blocks, layout.num_bytes), dtype=np.uint8)
    data[:, FP16_HIGH_BYTES[quantization]] &= 0xBF  # below 2: random bits as fp16 are often NaN, which has many forms
    quantization_type = gguf.GGMLQuantizationType[quantization]
    expected = gguf.quants.dequantize(data.reshape(*SHAPE[:-1], -1), quantization_type)
    actual = ours.dequantize(torch.from_numpy(data.reshape(-1)), quantization, SHAPE).float().numpy()
    assert actual.shape == SHAPE
    assert np.array_equal(actual.view(np.int32), expected.astype(np.float32).view(np.int32).reshape(SHAPE))


def test_a_type_that_nothing_reads_has_no_layout():
    assert ours.block_layout("I32") is None
    assert ours.block_layout("Q99") is None
