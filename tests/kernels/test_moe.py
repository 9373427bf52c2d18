"""Routing against a plain loop over tokens; the layer that follows from it; grouped products against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_close, random_tensor

from octavo.kernels.ops.moe import grouped_linear, route_tokens


@settings(max_examples=100, deadline=None)
@given(
    num_tokens=st.integers(0, 9),
    num_experts=st.integers(1, 6),
    num_chosen=st.integers(1, 6),
    renormalize=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_routing_equals_a_plain_loop(
    num_tokens: int, num_experts: int, num_chosen: int, renormalize: bool, seed: int
) -> None:
    """Few different logits, so that equals are told apart by expert."""
    num_chosen = min(num_chosen, num_experts)
    logits = (random_tensor(num_tokens, num_experts, dtype=torch.float32, seed=seed) * 2).round() / 2

    routing = route_tokens(logits, num_chosen, renormalize)

    pairs = []
    for token in range(num_tokens):
        shares = logits[token].double().softmax(-1).tolist()
        chosen = sorted(range(num_experts), key=lambda expert: (-round(shares[expert], 6), expert))[:num_chosen]
        total = sum(shares[expert] for expert in chosen) if renormalize else 1.0
        expected = torch.tensor([shares[expert] / total for expert in chosen]).float()
        torch.testing.assert_close(routing.weights[token], expected)
        pairs += [(expert, token) for expert in chosen]
        # positions lead back to this token, and to the experts in the order of its choice
        assert routing.token_ids[routing.positions[token]].tolist() == [token] * num_chosen
        starts = routing.expert_start_loc.tolist()
        for expert, position in zip(chosen, routing.positions[token].tolist(), strict=True):
            assert starts[expert] <= position < starts[expert + 1]
    assert routing.token_ids.tolist() == [token for _, token in sorted(pairs)]
    counts = [sum(expert == each for expert, _ in pairs) for each in range(num_experts)]
    assert routing.expert_start_loc.tolist() == [sum(counts[:each]) for each in range(num_experts + 1)]
    assert routing.expert_start_loc.dtype == torch.int32


def test_a_layer_of_experts() -> None:
    """Sorted, multiplied and put together again: the weighted sum of each token's experts."""
    x, weight = random_tensor(13, 24, dtype=torch.float32), random_tensor(5, 10, 24, dtype=torch.float32, seed=1) / 5
    logits = random_tensor(13, 5, dtype=torch.float32, seed=2)
    routing = route_tokens(logits, 2, renormalize=True)

    outputs = grouped_linear(x[routing.token_ids], weight, routing.expert_start_loc)
    result = (outputs[routing.positions] * routing.weights[..., None]).sum(1)

    likeliest = logits.double().topk(2)
    shares = likeliest.values.softmax(-1)
    expected = torch.stack(
        [
            sum(share * (weight[expert].double() @ row.double()) for share, expert in zip(*each, strict=True))
            for row, *each in zip(x, shares, likeliest.indices, strict=True)
        ]
    )
    assert_close(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nums_rows", [[0, 0], [3, 0, 4], [0, 1]], ids=str)
def test_grouped_products(nums_rows: list[int], dtype: torch.dtype) -> None:
    x = random_tensor(sum(nums_rows), 40, dtype=dtype)
    weight = random_tensor(len(nums_rows), 6, 40, dtype=dtype, seed=1) / 6
    expert_start_loc = torch.tensor([0, *nums_rows]).cumsum(0).to(torch.int32)

    result = grouped_linear(x, weight, expert_start_loc)

    parts = zip(x.double().split(nums_rows), weight.double(), strict=True)
    assert_close(result, torch.cat([rows @ of_expert.t() for rows, of_expert in parts]))
    assert result.dtype == dtype
