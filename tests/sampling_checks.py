"""What tokens a row may give, in float64 and from a full sort."""

from __future__ import annotations

import torch


def kept_tokens(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Return float64 probabilities of one row after the filters, from a full sort."""
    weights = torch.exp((row.double() - row.double().max()) / temperature)
    weights[weights < min_p] = 0
    order = sorted(range(len(row)), key=lambda token: (-weights[token].item(), token))
    if top_k:
        weights[order[top_k:]] = 0
    total, so_far = weights.sum().item(), 0.0
    for token in order:
        if so_far >= top_p * total and top_p < 1:
            weights[token] = 0
        so_far += weights[token].item()
    return weights / weights.sum()


def distance_to_step(probabilities: torch.Tensor, token: int, uniform: float) -> float:
    """How far `uniform` is outside the interval of `token`: 0 when the draw is right."""
    ends = probabilities.cumsum(0)
    start = ends[token] - probabilities[token]
    return max(0.0, (start - uniform).item(), (uniform - ends[token]).item())
