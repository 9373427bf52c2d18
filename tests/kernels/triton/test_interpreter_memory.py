"""Kernels that do with memory what they must not, each found; and the same kernels done right."""

import pytest
import torch
import triton
import triton.language as tl
import triton_interpreter
from triton_memory_checks import OutOfBoundsError, RaceError

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="about the interpreter")


@triton.jit
def copy_kernel(source, destination, num_elements, size: tl.constexpr):
    index = tl.program_id(0) * size + tl.arange(0, size)
    mask = index < num_elements
    tl.store(destination + index, tl.load(source + index, mask=mask), mask=mask)


@triton.jit
def shifted_kernel(source, destination, shift, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(destination + index, tl.load(source + index + shift))


@triton.jit
def row_kernel(source, destination, stride, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(destination + tl.program_id(0) * size + index, tl.load(source + tl.program_id(0) * stride + index))


@triton.jit
def store_number_kernel(destination, step):
    tl.store(destination + tl.program_id(0) * step, tl.program_id(0))


@triton.jit
def store_twice_kernel(destination, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(destination + index // 2, index)


@triton.jit
def chain_kernel(values, direction):
    program = tl.program_id(0)
    taken = tl.load(values + tl.maximum(program + direction, 0))
    tl.store(values + program, taken + 1)


@triton.jit
def in_place_kernel(values, size: tl.constexpr):
    index = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(values + index, tl.load(values + index) + 1)
    tl.store(values + index, tl.load(values + index) + 1)


@triton.jit
def count_kernel(counts):
    tl.atomic_add(counts, 1)


@triton.jit
def count_and_read_kernel(counts, out):
    tl.atomic_add(counts, 1)
    tl.store(out + tl.program_id(0), tl.load(counts))


@triton.jit
def store_in(destination, value):
    tl.store(destination, value)


@triton.jit
def nested_kernel(destination):
    store_in(destination, tl.program_id(0))


@triton.jit
def tuple_kernel(pair, size: tl.constexpr):
    index = tl.arange(0, size)
    tl.store(pair[1] + index, tl.load(pair[0] + index))


def test_what_is_masked_is_no_access() -> None:
    source = torch.randn(20)
    out = torch.zeros(20)
    copy_kernel[(2,)](source, out, 20, size=16)
    assert torch.equal(out, source)


@pytest.mark.parametrize(("shift", "where"), [(1, "byte 64 of source"), (-1, "load of 1 elements outside")])
def test_a_load_beside_its_tensor_is_found(shift: int, where: str) -> None:
    with pytest.raises(OutOfBoundsError, match=where):
        shifted_kernel[(1,)](torch.zeros(16), torch.zeros(16), shift, size=16)


def test_a_store_beside_its_tensor_is_found() -> None:
    with pytest.raises(OutOfBoundsError, match=r"store of 12 elements .* byte 16 of destination \(16 bytes\)"):
        shifted_kernel[(1,)](torch.zeros(16), torch.zeros(4), 0, size=16)


def test_the_storage_around_a_view_is_not_the_tensor() -> None:
    fused = torch.randn(4, 32)
    out = torch.zeros(4, 16)
    row_kernel[(4,)](fused[:, :16], out, 32, size=16)
    assert torch.equal(out, fused[:, :16])
    with pytest.raises(OutOfBoundsError, match="load of 8 elements"):
        row_kernel[(4,)](fused[:, :8], out, 32, size=16)


def test_views_of_one_storage_are_each_allowed() -> None:
    fused = torch.randn(4, 32)
    expected = fused[:, :16].clone()
    row_kernel[(1,)](fused[:, :16], fused[:1, 16:], 32, size=16)
    assert torch.equal(fused[0, 16:], expected[0])


def test_a_strided_view_of_wide_elements_over_bytes() -> None:
    pages = torch.zeros(64, dtype=torch.uint8)
    wide = pages.view(torch.float32)[::2]
    with pytest.raises(OutOfBoundsError):
        shifted_kernel[(1,)](wide, torch.zeros(8), 0, size=8)


def test_tensors_in_a_tuple_are_arguments() -> None:
    source, out = torch.randn(8), torch.zeros(8)
    tuple_kernel[(1,)]((source, out), size=8)
    assert torch.equal(out, source)


def test_two_programs_that_write_one_element_are_found() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    store_number_kernel[(4,)](out, 1)
    assert out.tolist() == [0, 1, 2, 3]
    with pytest.raises(RaceError, match=r"number 1 writes an element of destination that number 0 .* wrote"):
        store_number_kernel[(4,)](out, 0)


def test_a_race_in_a_device_function_is_found() -> None:
    with pytest.raises(RaceError):
        nested_kernel[(2,)](torch.zeros(1, dtype=torch.int32))


def test_a_second_launch_may_write_it_again() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    store_number_kernel[(4,)](out, 1)
    store_number_kernel[(4,)](out, 1)


def test_one_store_that_writes_an_element_twice_is_found() -> None:
    with pytest.raises(RaceError, match="twice at once"):
        store_twice_kernel[(1,)](torch.zeros(8, dtype=torch.int32), size=8)


def test_reading_what_another_program_wrote_is_found() -> None:
    with pytest.raises(RaceError, match=r"number 1 reads an element of values that number 0 .* wrote"):
        chain_kernel[(3,)](torch.zeros(4), -1)


def test_writing_what_another_program_read_before_is_found() -> None:
    with pytest.raises(RaceError, match=r"number 1 writes an element of values that number 0 .* read"):
        chain_kernel[(3,)](torch.zeros(5), 1)


def test_a_program_may_change_its_own_elements() -> None:
    values = torch.zeros(32)
    in_place_kernel[(2,)](values, size=16)
    assert torch.equal(values, torch.full((32,), 2.0))


def test_atomic_operations_may_meet_but_not_with_loads() -> None:
    counts = torch.zeros(1, dtype=torch.int32)
    count_kernel[(5,)](counts)
    assert counts.item() == 5
    with pytest.raises(RaceError, match=r"reads an element of counts that an atomic operation .* wrote"):
        count_and_read_kernel[(2,)](counts, torch.zeros(2, dtype=torch.int32))


def test_traffic_is_counted() -> None:
    before = triton_interpreter.CHECKS.traffic
    triton_interpreter.CHECKS.traffic = type(before)()
    copy_kernel[(2,)](torch.zeros(20), torch.zeros(20, dtype=torch.bfloat16), 20, size=16)
    traffic = triton_interpreter.CHECKS.traffic
    assert (traffic.num_launches, traffic.loaded_bytes, traffic.stored_bytes) == (1, 80, 40)
