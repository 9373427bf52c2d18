"""philox_uniform on a GPU: known answers, and the reference's bits over all of its range."""

import pytest
import torch
from dense_inputs import DEVICE, among_poison

from octavo.kernels.ops.philox import philox_uniform
from octavo.kernels.triton.philox import triton_philox_uniform


def uniform(seed: int, choice_index: int, position: int, draw: int) -> float:
    return triton_philox_uniform(
        *(torch.tensor([n], device=DEVICE) for n in (seed, choice_index, position, draw))
    ).item()


def number_of(first_word: int, second_word: int) -> float:
    return ((first_word << 21) | (second_word >> 11)) / 2**53


def test_known_answer_of_random123() -> None:
    """Those of its vectors whose last counter word is zero."""
    assert uniform(0, 0, 0, 0) == number_of(0x6627E8D5, 0xE169C58D)


@pytest.mark.parametrize("num_rows", [0, 1, 127, 129, 1000])
def test_equals_the_reference_bit_for_bit(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator).to(DEVICE)
    words = [torch.randint(0, 2**32, (num_rows,), generator=generator).to(DEVICE) for _ in range(3)]

    numbers = triton_philox_uniform(*(among_poison(each) for each in (seeds, *words)))

    assert numbers.dtype == torch.float64
    assert torch.equal(numbers, philox_uniform(seeds, *words))


def test_the_ends_of_every_range() -> None:
    ends = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1], device=DEVICE)
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 2**32], device=DEVICE)
    coordinates = torch.cartesian_prod(seeds, ends, ends, ends).unbind(1)
    assert torch.equal(triton_philox_uniform(*coordinates), philox_uniform(*coordinates))


def test_columns_of_one_table() -> None:
    table = torch.arange(40, device=DEVICE).view(10, 4)
    assert torch.equal(triton_philox_uniform(*table.unbind(1)), philox_uniform(*table.unbind(1)))
