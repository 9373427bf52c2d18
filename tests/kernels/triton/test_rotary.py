"""rotary on a GPU: against float64, heads read where they lie in the fused projection, and partly turned heads."""

import pytest
import torch
from dense_inputs import DTYPES, among_poison, random_input
from kernel_checks import assert_close

from octavo.kernels.ops.rotary import rotary
from octavo.kernels.triton.rotary import triton_rotary


def expected_heads(heads: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    wide, half = heads.double(), cos_sin.shape[1] // 2
    angles = cos_sin[positions].double()[:, None]
    cos, sin = angles[..., :half], angles[..., half:]
    first, second = wide[..., :half], wide[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, first * sin + second * cos, wide[..., 2 * half :]), -1)


def table(num_positions: int, rotary_dim: int) -> torch.Tensor:
    angles = random_input(num_positions, rotary_dim // 2, seed=9) * 3
    return torch.cat((angles.cos(), angles.sin()), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_query_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 16, 16), (9, 3, 64, 64), (1, 1, 2, 2), (17, 1, 80, 80), (8, 8, 24, 8), (3, 2, 96, 90)],
)
def test_heads_of_a_fused_projection(
    num_query_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    """Query and key as views between which others' elements lie; angles of other positions are NaN."""
    fused = among_poison(random_input(6, num_query_heads + 2 * num_kv_heads, head_dim, dtype=dtype))
    query, key, _ = fused.split([num_query_heads, num_kv_heads, num_kv_heads], dim=1)
    before = fused.clone()
    positions = torch.tensor([0, 1, 30, 2, 2, 17], device=fused.device)
    cos_sin = table(31, rotary_dim)
    others = torch.ones(31, dtype=torch.bool, device=fused.device).index_fill_(0, positions, False)
    cos_sin[others] = torch.nan

    turned_query, turned_key = triton_rotary(query, key, among_poison(positions), among_poison(cos_sin))

    assert turned_query.is_contiguous()
    assert turned_key.is_contiguous()
    for turned, heads in ((turned_query, query), (turned_key, key)):
        assert turned.dtype == dtype
        assert_close(turned, expected_heads(heads, positions, cos_sin))
        assert torch.equal(turned[..., rotary_dim:], heads[..., rotary_dim:])
    assert torch.equal(fused, before)


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_equals_the_reference(num_tokens: int) -> None:
    query, key = random_input(num_tokens, 5, 48), random_input(num_tokens, 1, 48, seed=1)
    positions = torch.arange(num_tokens, device=query.device).flip(0) * 7
    cos_sin = table(300, 32)
    for got, expected in zip(
        triton_rotary(query, key, positions, cos_sin), rotary(query, key, positions, cos_sin), strict=True
    ):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_elements_that_are_not_adjacent() -> None:
    query, key = random_input(2, 3, 32)[..., ::2], random_input(2, 16, 1, seed=1).transpose(1, 2)
    positions, cos_sin = torch.tensor([3, 5], device=query.device), table(6, 16)
    turned_query, turned_key = triton_rotary(query, key, positions, cos_sin)
    assert_close(turned_query, expected_heads(query, positions, cos_sin))
    assert_close(turned_key, expected_heads(key, positions, cos_sin))
