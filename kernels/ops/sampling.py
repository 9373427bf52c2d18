"""Drawing one token per row of logits.

A row's token is a function of that row's logits, options and random number; no other row has a say. A row pays for
what it asks: a greedy row for a maximum, a plain row for one pass over the vocabulary, a row with top_k or top_p for
the selection of its NUM_CANDIDATES likeliest tokens, and for more only when those cannot decide it. Filters
apply in the order temperature, min_p, top_k, top_p, as in vLLM; unlike there, top_k keeps k tokens also among equals,
those with the lowest ids. Rejected: `torch.multinomial` (one generator for all rows, and slower than a small model)
and Gumbel noise (one random number per token of the vocabulary instead of one per row).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from octavo.kernels.registry import op

INVALID_TOKEN_ID = -1
NUM_CANDIDATES = 256
WIDENING = 16
SEGMENT = 256  # tokens; the draw finds the segment first, then the token in it


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the first token id of each row at which the running sum of weights exceeds uniform · total.

    Sums are float64. The token has a positive weight: the running sum grows there.
    """
    padding = -weights.shape[1] % SEGMENT
    padded = functional.pad(weights, (0, padding)) if padding else weights
    segments = padded.view(len(weights), -1, SEGMENT)
    ends = segments.sum(-1, dtype=torch.float64).cumsum(-1)
    targets = uniforms[:, None] * ends[:, -1:]
    segment = torch.searchsorted(ends, targets, right=True)
    before = functional.pad(ends, (1, 0)).gather(1, segment)
    sums = segments[torch.arange(len(weights), device=weights.device), segment[:, 0]].double().cumsum(-1)
    # Rounded in another order, the segment's own sum may fall short of the rest of the target.
    rest = torch.minimum(targets - before, sums[:, -1:].nextafter(sums.new_zeros(())))
    return (segment * SEGMENT + torch.searchsorted(sums, rest, right=True))[:, 0]


def _zero_least_likely(
    weights: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, num_candidates: int
) -> torch.Tensor:
    """Set to zero, and return, the weights of tokens that top_k, then top_p, leave out; a top_k is 1 to vocab_size.

    The likeliest tokens' weights, in order, say how many tokens stay and what the last of them weighs; among equals of
    that one, the lowest ids stay. Candidates cannot decide a row if they are fewer than its top_k, or fewer than what
    its top_p keeps; such rows are done again with WIDENING times as many.
    """
    vocab_size, ks, ps = weights.shape[1], top_ks[:, None], top_ps[:, None]
    num_candidates = min(num_candidates, vocab_size)
    likeliest = weights.topk(num_candidates, dim=-1).values
    sums = functional.pad(likeliest.double().cumsum(-1), (1, 0))
    sums_of_k = sums.gather(1, ks.clamp(max=num_candidates))
    totals = torch.where(ks == vocab_size, weights.sum(-1, keepdim=True, dtype=torch.float64), sums_of_k)
    is_kept = (sums[:, :-1] < ps * totals) | (ps >= 1)
    is_kept &= torch.arange(num_candidates, device=weights.device) < ks
    num_kept = is_kept.sum(-1, keepdim=True)
    is_undecided = (ks > num_candidates) & ((ks < vocab_size) | (num_kept == num_candidates))
    cut = likeliest.gather(1, num_kept - 1).masked_fill_(is_undecided, 0)
    _zero_below(weights, cut, num_kept)
    rows = is_undecided.nonzero()[:, 0]
    if len(rows):
        weights[rows] = _zero_least_likely(weights[rows], top_ks[rows], top_ps[rows], num_candidates * WIDENING)
    return weights


def _zero_below(weights: torch.Tensor, cut: torch.Tensor, num_kept: torch.Tensor) -> None:
    """Set weights below `cut` to zero, and of those equal to it the last ones beyond `num_kept` in all."""
    weights.masked_fill_(weights < cut, 0)
    num_too_many = weights.count_nonzero(-1)[:, None] - num_kept
    rows = ((num_too_many > 0) & (cut > 0)).nonzero()[:, 0]
    if len(rows):
        tied = weights[rows]
        is_equal = tied == cut[rows]
        num_equal_kept = is_equal.sum(-1, keepdim=True) - num_too_many[rows]
        weights[rows] = tied.masked_fill_(is_equal & (is_equal.cumsum(-1) > num_equal_kept), 0)


def _filter(
    weights: torch.Tensor, top_ks: torch.Tensor | None, top_ps: torch.Tensor | None, min_ps: torch.Tensor | None
) -> torch.Tensor:
    """Set to zero, and return, the weights of tokens that the options leave out; the largest weight of a row is 1."""
    if min_ps is not None:
        weights.masked_fill_(weights < min_ps[:, None], 0)
    if top_ks is None and top_ps is None:
        return weights
    num_rows, vocab_size = weights.shape
    ks = torch.zeros(num_rows, dtype=torch.int64, device=weights.device) if top_ks is None else top_ks
    ks = ks.masked_fill(ks == 0, vocab_size).clamp_(max=vocab_size)
    ps = torch.ones(num_rows, dtype=torch.float64, device=weights.device) if top_ps is None else top_ps
    rows = ((ks < vocab_size) | (ps < 1)).nonzero()[:, 0]
    if len(rows) == num_rows:
        return _zero_least_likely(weights, ks, ps, NUM_CANDIDATES)
    if len(rows):
        weights[rows] = _zero_least_likely(weights[rows], ks[rows], ps[rows], NUM_CANDIDATES)
    return weights


@op
def sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row: greedy, or by inverting the distribution function over the kept tokens in id order.

    Args:
        logits: fp32 [num_rows, vocab_size]; -inf excludes a token.
        temperatures: fp32 [num_rows]; 0 is greedy, and equals go to the lowest id.
        top_ks: int64 [num_rows], 0 is all; None when no row asks for it, as for the next two.
        top_ps: float64 [num_rows], in (0, 1].
        min_ps: fp32 [num_rows], in [0, 1].
        uniforms: float64 [num_rows], in [0, 1); not used by greedy rows.

    Returns:
        int64 [num_rows]; INVALID_TOKEN_ID for a row that is no distribution: it has a NaN or +inf, or nothing but -inf.
    """
    maxima, likeliest_ids = logits.max(dim=-1)
    is_valid = maxima.isfinite()
    result = likeliest_ids.masked_fill(~is_valid, INVALID_TOKEN_ID)
    rows = (is_valid & (temperatures > 0)).nonzero()[:, 0]
    if len(rows):
        weights = logits[rows].sub_(maxima[rows, None]).div_(temperatures[rows, None]).exp_()
        options = (option if option is None else option[rows] for option in (top_ks, top_ps, min_ps))
        result[rows] = _draw(_filter(weights, *options), uniforms[rows])
    return result
