"""Mixtures of experts (Shazeer et al. 2017): which expert computes which token, and the products of all experts.

Tokens are sorted by expert, so that each expert's rows lie together and one call multiplies them all; nothing of that
depends on values that the host would have to wait for. Invariant: a token's result depends on that token alone, not on
who else chose its expert; for that, a token's choices are put together again in the order of its own list.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from octavo.kernels.ops.linear import linear
from octavo.kernels.registry import op


class Routing(NamedTuple):
    """Which expert computes which token; sorted rows are pairs of a token and one of its experts, by expert.

    With `outputs` [T · k, ...] in the order of the sorted rows, the layer's result is
    `(outputs[positions] * weights[..., None]).sum(1)`.

    Attributes:
        token_ids: int64 [T · k], the token of each sorted row; those of one expert in ascending order.
        expert_start_loc: int32 [num_experts + 1], where each expert's rows begin; the last is T · k.
        positions: int64 [T, k], where among the sorted rows each token's experts are, likeliest first.
        weights: fp32 [T, k], the shares of these experts.
    """

    token_ids: torch.Tensor
    expert_start_loc: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor


@op
def route_tokens(router_logits: torch.Tensor, num_experts_per_token: int, renormalize: bool) -> Routing:
    """Choose the likeliest experts of each token, equals by ascending expert, and sort the choices by expert.

    Args:
        router_logits: [T, num_experts]; the softmax over all experts is computed in fp32.
        num_experts_per_token: k, at most num_experts.
        renormalize: scale a token's k shares to a sum of 1, as Mixtral does.
    """
    num_experts = router_logits.shape[1]
    shares, experts = router_logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, chosen = shares[:, :num_experts_per_token], experts[:, :num_experts_per_token].flatten()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    sorted_experts, order = chosen.sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=chosen.device)
    expert_start_loc = torch.searchsorted(sorted_experts, bounds, out_int32=True)
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)
    return Routing(order // num_experts_per_token, expert_start_loc, positions.view(weights.shape), weights)


@op
def grouped_linear(x: torch.Tensor, weight: torch.Tensor, expert_start_loc: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows with that expert's weight: x_e W_eᵀ.

    Args:
        x: [num_rows, in], rows of expert e from expert_start_loc[e] up to expert_start_loc[e + 1].
        weight: [num_experts, out, in], of the dtype of x.
        expert_start_loc: int32 [num_experts + 1], not descending, from 0 to num_rows.

    Returns:
        [num_rows, out], contiguous, in the dtype of x.
    """
    result = x.new_empty(x.shape[0], weight.shape[1])
    for expert, (start, end) in enumerate(pairwise(expert_start_loc.tolist())):
        if end > start:
            result[start:end] = linear(x[start:end], weight[expert])
    return result
