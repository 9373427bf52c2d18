"""Drawing one token per row of logits."""

from __future__ import annotations

import torch

from octavo.kernels.registry import op

INVALID_TOKEN_ID = -1


@op
def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row; every row independent of the others."""
    top_values, top_ids = logits.max(dim=-1)
    is_valid = top_values.isfinite()
    result = torch.where(is_valid, top_ids, INVALID_TOKEN_ID)
    rows = torch.nonzero(is_valid & (temperatures > 0)).flatten()
    for row in rows.tolist():
        weights = ((logits[row] - top_values[row]) / temperatures[row]).exp()
        if min_ps is not None:
            weights = weights * (weights >= min_ps[row])
        ordered, ids = weights.sort(descending=True, stable=True)
        ordered = ordered.double()
        if top_ks is not None and 0 < top_ks[row] < ordered.numel():
            ordered[int(top_ks[row]) :] = 0
        if top_ps is not None and top_ps[row] < 1:
            before = ordered.cumsum(0) - ordered
            ordered[before >= top_ps[row] * ordered.sum()] = 0
        kept = torch.zeros_like(ordered).index_copy_(0, ids, ordered)
        sums = kept.cumsum(0)
        result[row] = torch.searchsorted(sums, uniforms[row] * sums[-1], right=True)
    return result
