"""Kernels move the bytes that the roofline counts, from the shapes, and hardly more.

Tiles of the size that a GPU gets are larger than these shapes, so what is read is what the masks let through.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton_interpreter
from triton_memory_checks import Traffic

import octavo.kernels.triton.backends  # noqa: F401 - registers what is looked up here
from octavo.kernels.ops import activation, attention, norm, rotary

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the interpreter counts")

BF16 = torch.bfloat16
LARGEST_EXCESS = 1.1


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    """What launches move from here on."""
    before = triton_interpreter.CHECKS.traffic
    triton_interpreter.CHECKS.traffic = Traffic()
    yield triton_interpreter.CHECKS.traffic
    triton_interpreter.CHECKS.traffic = before


def assert_moved(traffic: Traffic, loaded_bytes: int, stored_bytes: int) -> None:
    assert loaded_bytes <= traffic.loaded_bytes <= LARGEST_EXCESS * loaded_bytes
    assert stored_bytes <= traffic.stored_bytes <= LARGEST_EXCESS * stored_bytes


def test_decode_attention_reads_each_key_and_value_once(traffic: Traffic) -> None:
    seq_lens, heads = [200, 130, 77], attention.HeadShape(8, 2, 64)
    num_requests, max_blocks = len(seq_lens), 13
    cache = torch.zeros(2, num_requests * max_blocks, 16, *heads[1:], dtype=BF16)
    query = torch.zeros(num_requests, heads.num_query_heads, heads.head_dim, dtype=BF16)
    plan = attention.plan_attention.implementations["triton"](
        np.ones(num_requests, np.int32), np.array(seq_lens, np.int32), heads
    )
    attention.paged_attention.implementations["triton"](
        query,
        cache,
        torch.arange(num_requests + 1, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.arange(num_requests * max_blocks, dtype=torch.int32).view(num_requests, max_blocks),
        0.125,
        plan=plan,
    )
    assert_moved(traffic, sum(seq_lens) * 2 * 2 * 64 * 2 + query.nbytes, query.nbytes)


def test_writing_kv_reads_and_writes_each_vector_once(traffic: Traffic) -> None:
    key, value = torch.zeros(2, 5, 2, 64, dtype=BF16)
    cache = torch.zeros(2, 4, 16, 2, 64, dtype=BF16)
    attention.write_kv.implementations["triton"](key, value, cache, torch.arange(5))
    assert_moved(traffic, 2 * key.nbytes, 2 * key.nbytes)


def test_a_norm_reads_and_writes_each_number_once(traffic: Traffic) -> None:
    x, residual = torch.zeros(2, 64, 256, dtype=BF16)
    norm.rms_norm.implementations["triton"](x, torch.ones(256, dtype=BF16), 1e-5, residual)
    weight_bytes = 512
    assert traffic.loaded_bytes <= 2 * x.nbytes + len(x) * weight_bytes  # the weight is in the cache
    assert traffic.stored_bytes == 2 * x.nbytes


def test_a_gated_product_reads_and_writes_each_number_once(traffic: Traffic) -> None:
    gate_up = torch.zeros(4, 512, dtype=BF16)
    activation.silu_mul.implementations["triton"](gate_up)
    assert_moved(traffic, gate_up.nbytes, gate_up.nbytes // 2)


def test_rotary_reads_and_writes_each_number_once(traffic: Traffic) -> None:
    query, key = torch.zeros(6, 8, 64, dtype=BF16), torch.zeros(6, 2, 64, dtype=BF16)
    rotary.rotary.implementations["triton"](query, key, torch.arange(6), torch.zeros(16, 64))
    assert traffic.stored_bytes == query.nbytes + key.nbytes
    assert traffic.loaded_bytes >= query.nbytes + key.nbytes  # and the angles, which are in the cache
