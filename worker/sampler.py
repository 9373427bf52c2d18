"""Sampling of one step: what the rows ask for, turned into tensors on the host; the draw, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.kernels.ops.philox import philox_uniform
from octavo.kernels.ops.sampling import sample_tokens
from octavo.protocol.sampling_params import SamplingParams


class SamplingRow(NamedTuple):
    """One row of logits: the options of its request, and the index of the output token that it gives."""

    sampling_params: SamplingParams
    output_position: int


class SamplingBatch(NamedTuple):
    """The tensors of one step, on the device; None where no row asks for it."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor | None
    top_ps: torch.Tensor | None
    min_ps: torch.Tensor | None
    uniforms: torch.Tensor
    masked_rows: torch.Tensor | None
    masked_token_ids: torch.Tensor | None


class SamplingResult(NamedTuple):
    """Token ids, int64 [num_rows]; and which rows had no valid distribution, bool [num_rows]."""

    token_ids: torch.Tensor
    is_invalid: torch.Tensor


class Sampler:
    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.device = device

    def prepare(self, rows: Sequence[SamplingRow]) -> SamplingBatch:
        params = [row.sampling_params for row in rows]
        seeds = torch.tensor([p.seed for p in params], dtype=torch.int64)
        choices = torch.tensor([p.choice_index for p in params], dtype=torch.int64)
        positions = torch.tensor([row.output_position for row in rows], dtype=torch.int64)
        uniforms = philox_uniform(seeds, choices, positions, torch.zeros_like(positions))
        masked = [
            (index, token_id)
            for index, row in enumerate(rows)
            if row.output_position < row.sampling_params.min_tokens
            for token_id in {*self.eos_token_ids, *row.sampling_params.stop_token_ids}
            if token_id < self.vocab_size
        ]
        indices = torch.tensor(masked, dtype=torch.int64, device=self.device).unbind(1) if masked else (None, None)
        return SamplingBatch(
            torch.tensor([p.temperature for p in params], dtype=torch.float32, device=self.device),
            torch.tensor([p.top_k for p in params], dtype=torch.int64, device=self.device),
            torch.tensor([p.top_p for p in params], dtype=torch.float64, device=self.device),
            torch.tensor([p.min_p for p in params], dtype=torch.float32, device=self.device),
            uniforms.to(self.device),
            *indices,
        )

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SamplingResult:
        if batch.masked_rows is not None:
            logits[batch.masked_rows, batch.masked_token_ids] -= torch.inf
        token_ids = sample_tokens(logits, batch.temperatures, batch.top_ks, batch.top_ps, batch.min_ps, batch.uniforms)
        return SamplingResult(token_ids, token_ids < 0)
