"""Sampling of one step: on the host, what the rows ask for becomes tensors; on the device, one token per row is drawn.

Invariant: the token of a row is a function of its logits, its request's options and the position in its output. So it
is the same whoever shares the step, and again after a preemption or a restart. A row whose logits are no distribution
is reported and gets no token; its neighbours get theirs. Rows of beam searches draw nothing: they list candidates, by
raw logprobs, and what `min_tokens` forbids is left out of the list only (the way of transformers' `generate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.kernels.ops.philox import philox_uniform
from octavo.kernels.ops.sampling import sample_tokens
from octavo.protocol.worker_messages import Candidates
from octavo.worker.sampling_table import SamplingTable

TOKEN_DRAW = 0  # the only draw per token so far


class SamplingRows(NamedTuple):
    """The rows of one step that give a token.

    Attributes:
        table: the options of all rows.
        rows: int64 [num_rows], which of them.
        output_positions: int64 [num_rows], the index in each request's output of the token that it gives.
    """

    table: SamplingTable
    rows: np.ndarray
    output_positions: np.ndarray


class SamplingBatch(NamedTuple):
    """What one step's rows ask for, on the device; None where no row asks for it.

    Attributes:
        temperatures, top_ks, top_ps, min_ps, uniforms: arguments of `sample_tokens`.
        masked: int64 [2, num_masked], rows and token ids that must not be drawn.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor | None
    top_ps: torch.Tensor | None
    min_ps: torch.Tensor | None
    uniforms: torch.Tensor
    masked: torch.Tensor | None


class SamplingResult(NamedTuple):
    """The outcome of one step.

    Attributes:
        token_ids: int64 [num_rows], on the device; without meaning where is_invalid.
        is_invalid: bool [num_rows], the row had a NaN or +inf, or no token was left: ErrorCode.NUMERICAL_ERROR.
    """

    token_ids: torch.Tensor
    is_invalid: torch.Tensor


class Sampler:
    """Draws tokens for a model with `vocab_size` logits that ends requests at `eos_token_ids`."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.device = device

    def prepare(self, sampled: SamplingRows) -> SamplingBatch:
        """Build the tensors of one step, in the order of the rows."""
        table, rows = sampled.table, sampled.rows
        top_ks, top_ps, min_ps = table.top_ks[rows], table.top_ps[rows], table.min_ps[rows]
        return SamplingBatch(
            temperatures=self._tensor(table.temperatures[rows]),
            top_ks=self._tensor(top_ks) if top_ks.any() else None,
            top_ps=self._tensor(top_ps) if (top_ps < 1).any() else None,
            min_ps=self._tensor(min_ps) if min_ps.any() else None,
            uniforms=self._uniforms(sampled),
            masked=self._masked(sampled),
        )

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SamplingResult:
        """Draw a token per row of `logits`, fp32 [num_rows, vocab_size]; masked tokens are overwritten in it."""
        if batch.masked is not None:
            masked_rows, masked_token_ids = batch.masked
            logits[masked_rows, masked_token_ids] -= torch.inf  # a NaN stays one, and is reported
        token_ids = sample_tokens(logits, batch.temperatures, batch.top_ks, batch.top_ps, batch.min_ps, batch.uniforms)
        return SamplingResult(token_ids, token_ids < 0)

    def list_candidates(self, logits: torch.Tensor, listed: SamplingRows) -> list[Candidates]:
        """List what each row asked for, from fp32 [num_rows, vocab_size]; nothing for a row that is no distribution."""
        nums = listed.table.num_candidates[listed.rows].tolist()
        token_ids, logprobs = likeliest_tokens(logits, max(nums), self._masked(listed))
        nums_possible = (token_ids >= 0).sum(-1).tolist()
        return [
            Candidates(ids[: min(num, num_possible)], values[: min(num, num_possible)])
            for ids, values, num, num_possible in zip(
                token_ids.tolist(), logprobs.tolist(), nums, nums_possible, strict=True
            )
        ]

    def _uniforms(self, sampled: SamplingRows) -> torch.Tensor:
        """Return float64 [num_rows], zeros when every row is greedy."""
        table, rows = sampled.table, sampled.rows
        if not table.temperatures[rows].any():
            return torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        seeds, choice_indices = self._tensor(table.seeds[rows]), self._tensor(table.choice_indices[rows])
        positions = self._tensor(sampled.output_positions)
        return philox_uniform(seeds, choice_indices, positions, torch.full_like(positions, TOKEN_DRAW))

    def _masked(self, sampled: SamplingRows) -> torch.Tensor | None:
        """List the tokens that would end a request before its min_tokens; ids beyond the vocabulary cannot occur."""
        table, rows = sampled.table, sampled.rows
        pairs = [
            (index, token_id)
            for index in np.flatnonzero(sampled.output_positions < table.min_tokens[rows]).tolist()
            for token_id in self.eos_token_ids.union(table.stop_token_ids[rows[index]])
            if token_id < self.vocab_size
        ]
        return self._tensor(np.array(pairs, np.int64).T) if pairs else None

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)
