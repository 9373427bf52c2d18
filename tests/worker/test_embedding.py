"""The output head: fp32 logits from weights of any dtype."""

from __future__ import annotations

import pytest
import torch

from octavo.worker.layers import linear_weight
from octavo.worker.layers.embedding import OutputHead
from octavo.worker.layers.linear_weight import WeightFactory
from octavo.worker.layers.weight_memory import WeightMemory

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [7, 64, 2048])
def test_logits_have_the_precision_of_fp32(monkeypatch, dtype, tile):
    monkeypatch.setattr(linear_weight, "HEAD_TILE", tile)
    generator = torch.Generator().manual_seed(0)
    head = OutputHead(100, 64, None, WeightFactory(dtype, CPU, WeightMemory(CPU)))
    head.weight.tensor.data.copy_(torch.randn(100, 64, generator=generator))
    hidden = torch.randn(5, 64, generator=generator).to(dtype)
    logits = head(hidden)
    assert logits.dtype is torch.float32
    expected = hidden.double() @ head.weight.tensor.double().t()
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
