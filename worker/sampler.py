"""Sampling of one step: on the host, what the rows ask for becomes tensors; on the device, one token per row is drawn.

Invariant: the token of a row is a function of its logits, its request's options and the position in its output. So it
is the same whoever shares the step, and again after a preemption or a restart. A row whose logits are no distribution
is reported and gets no token; its neighbours get theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from octavo.kernels.ops.philox import philox_uniform
from octavo.kernels.ops.sampling import sample_tokens
from octavo.protocol.sampling_params import SamplingParams

TOKEN_DRAW = 0  # the only draw per token so far


class SamplingRow(NamedTuple):
    """One row of logits: its request's options, and the index in the request's output of the token that it gives."""

    sampling_params: SamplingParams
    output_position: int


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

    def prepare(self, rows: Sequence[SamplingRow]) -> SamplingBatch:
        """Build the tensors of one step, in the order of `rows`."""
        params = [row.sampling_params for row in rows]
        return SamplingBatch(
            temperatures=self._tensor([p.temperature for p in params], torch.float32),
            top_ks=self._tensor_if(any(p.top_k for p in params), [p.top_k for p in params], torch.int64),
            top_ps=self._tensor_if(any(p.top_p < 1 for p in params), [p.top_p for p in params], torch.float64),
            min_ps=self._tensor_if(any(p.min_p for p in params), [p.min_p for p in params], torch.float32),
            uniforms=self._uniforms(rows),
            masked=self._masked(rows),
        )

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SamplingResult:
        """Draw a token per row of `logits`, fp32 [num_rows, vocab_size]; masked tokens are overwritten in it."""
        if batch.masked is not None:
            masked_rows, masked_token_ids = batch.masked
            logits[masked_rows, masked_token_ids] -= torch.inf  # a NaN stays one, and is reported
        token_ids = sample_tokens(logits, batch.temperatures, batch.top_ks, batch.top_ps, batch.min_ps, batch.uniforms)
        return SamplingResult(token_ids, token_ids < 0)

    def _uniforms(self, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Return float64 [num_rows], zeros when every row is greedy."""
        if all(row.sampling_params.is_greedy for row in rows):
            return torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        seeds = self._tensor([row.sampling_params.seed for row in rows], torch.int64)
        choice_indices = self._tensor([row.sampling_params.choice_index for row in rows], torch.int64)
        positions = self._tensor([row.output_position for row in rows], torch.int64)
        return philox_uniform(seeds, choice_indices, positions, torch.full_like(positions, TOKEN_DRAW))

    def _masked(self, rows: Sequence[SamplingRow]) -> torch.Tensor | None:
        """List the tokens that would end a request before its min_tokens; ids beyond the vocabulary cannot occur."""
        pairs = [
            (index, token_id)
            for index, (params, output_position) in enumerate(rows)
            if output_position < params.min_tokens
            for token_id in self.eos_token_ids.union(params.stop_token_ids)
            if token_id < self.vocab_size
        ]
        return self._tensor(pairs, torch.int64).t() if pairs else None

    def _tensor(self, values: Iterable[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _tensor_if(self, is_asked: bool, values: Iterable[object], dtype: torch.dtype) -> torch.Tensor | None:
        return self._tensor(values, dtype) if is_asked else None
