"""The products of all experts on a GPU: against float64, whatever the experts' shares of the rows."""

import math

import pytest
import torch
from dense_inputs import DEVICE, DTYPES, among_poison, random_input
from kernel_checks import assert_close

from octavo.kernels.triton.moe import triton_grouped_linear


def start_locs(nums_rows: list[int]) -> torch.Tensor:
    return torch.tensor([0, *nums_rows], device=DEVICE).cumsum(0).to(torch.int32)


def weights_of(num_experts: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return random_input(num_experts, num_outputs, num_inputs, dtype=dtype, seed=1) / math.sqrt(num_inputs)


def expected_products(x: torch.Tensor, weight: torch.Tensor, nums_rows: list[int]) -> torch.Tensor:
    parts = zip(x.double().split(nums_rows), weight.double(), strict=True)
    return torch.cat([rows @ of_expert.t() for rows, of_expert in parts])


SHARES = [
    [1],
    [0, 0, 1, 0],
    [5, 0, 17, 1, 0, 0, 3],
    [64, 63, 65, 1],
    [0, 130, 0],
    [1] * 9,
    [0, 0, 0],
    [33, 32, 31],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nums_rows", SHARES, ids=str)
def test_shares_of_any_size(nums_rows: list[int], dtype: torch.dtype) -> None:
    x = random_input(sum(nums_rows), 70, dtype=dtype)
    weight = weights_of(len(nums_rows), 67, 70, dtype)

    result = triton_grouped_linear(among_poison(x), among_poison(weight), start_locs(nums_rows))

    assert result.dtype == dtype
    assert result.is_contiguous()
    assert_close(result, expected_products(x, weight, nums_rows))


def test_many_experts_with_few_rows_each() -> None:
    nums_rows = [(expert * 7) % 5 for expert in range(100)]
    x, weight = random_input(sum(nums_rows), 16), weights_of(100, 8, 16, torch.float32)
    assert_close(triton_grouped_linear(x, weight, start_locs(nums_rows)), expected_products(x, weight, nums_rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_whoever_else_chose_its_expert(dtype: torch.dtype) -> None:
    x, weight = random_input(90, 96, dtype=dtype), weights_of(3, 40, 96, dtype)
    together = triton_grouped_linear(x, weight, start_locs([20, 70, 0]))
    for row, expert in ((0, 0), (19, 0), (20, 1), (84, 1), (89, 1)):
        alone = triton_grouped_linear(x[row : row + 1], weight, start_locs([int(expert == e) for e in range(3)]))
        assert torch.equal(alone[0], together[row])


def test_experts_that_nobody_chose_are_not_read() -> None:
    x, weight = random_input(6, 20), weights_of(4, 10, 20, torch.float32)
    expected = expected_products(x, weight, [0, 4, 0, 2])
    weight[0], weight[2] = torch.nan, torch.nan
    assert_close(triton_grouped_linear(x, weight, start_locs([0, 4, 0, 2])), expected)
