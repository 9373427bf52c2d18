"""A launch with its tensors taken elsewhere does what it does in place; here, elsewhere is other memory of the host."""

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton_on_device import with_tensors_on

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="a stand-in for what a GPU does")

run_elsewhere = with_tensors_on(torch.device("cpu"), InterpretedFunction.run)


class Pair(NamedTuple):
    source: torch.Tensor
    destination: torch.Tensor


@triton.jit
def add_one_kernel(pair, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(pair[1] + index, tl.load(pair[0] + index) + 1)


@triton.jit
def address_kernel(values, addresses):
    tl.store(addresses, values.to(tl.int64))


def test_what_a_launch_writes_comes_back() -> None:
    storage = torch.arange(32, dtype=torch.float32)
    pair = Pair(storage[::1][4:12], storage[16:24])
    run_elsewhere(add_one_kernel, pair, grid=(1,), warmup=False, size=8)
    expected = torch.arange(32, dtype=torch.float32)
    expected[16:24] = expected[4:12] + 1
    assert torch.equal(storage, expected)


def test_views_of_one_storage_stay_together() -> None:
    storage = torch.zeros(16)
    run_elsewhere(add_one_kernel, Pair(storage, storage), grid=(1,), warmup=False, size=16)
    assert torch.equal(storage, torch.ones(16))


def test_the_kernel_sees_the_copy() -> None:
    values, addresses = torch.zeros(64)[16:], torch.zeros(1, dtype=torch.int64)
    run_elsewhere(address_kernel, values, addresses, grid=(1,), warmup=False)
    assert addresses.item() != values.data_ptr()
