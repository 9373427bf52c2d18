"""Sampling of one step: on the host, what the rows ask for becomes arrays; on the device, one token per row is drawn.

Invariant: the token of a row is a function of its logits, its request's options and the position in its output. So it
is the same whoever shares the step, and again after a preemption or a restart. A row whose logits are no distribution
is reported and gets no token; its neighbours get theirs. Rows of beam searches draw nothing: they list candidates, by
raw logprobs, and what `min_tokens` forbids is left out of the list only (the way of transformers' `generate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from octavo.kernels.ops.philox import philox_uniform
from octavo.kernels.ops.sampling import sample_tokens
from octavo.protocol.worker_messages import Candidates
from octavo.worker.sampling_table import SamplingTable

TOKEN_DRAW = 0  # the only draw per token so far

Array = Any  # np.ndarray on the host, torch.Tensor on the device


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
    """What one step's rows ask for, in the order of the rows; None where no row asks for it.

    Made of arrays on the host, then of tensors on the device with the same names.

    Attributes:
        temperatures: fp32 [num_rows].
        top_ks: int64, top_ps: float64, min_ps: fp32 [num_rows], as `sample_tokens` takes them.
        seeds, choice_indices, output_positions: int64 [num_rows], what the random numbers are made of.
    """

    temperatures: Array
    top_ks: Array | None
    top_ps: Array | None
    min_ps: Array | None
    seeds: Array | None
    choice_indices: Array | None
    output_positions: Array | None


def uniforms_of(batch: SamplingBatch) -> torch.Tensor:
    """Return the random numbers of the rows, float64 [num_rows]; zeros when every row is greedy."""
    if batch.seeds is None:
        return torch.zeros_like(batch.temperatures, dtype=torch.float64)
    draws = torch.full_like(batch.output_positions, TOKEN_DRAW)
    return philox_uniform(batch.seeds, batch.choice_indices, batch.output_positions, draws)


class Sampler:
    """Draws tokens for a model with `vocab_size` logits that ends requests at `eos_token_ids`."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)

    def prepare(self, sampled: SamplingRows) -> SamplingBatch:
        """Gather what one step's rows ask for, as arrays on the host."""
        table, rows = sampled.table, sampled.rows
        temperatures, top_ks, top_ps, min_ps = (
            option[rows] for option in (table.temperatures, table.top_ks, table.top_ps, table.min_ps)
        )
        is_random = temperatures.any()
        return SamplingBatch(
            temperatures=temperatures,
            top_ks=top_ks if top_ks.any() else None,
            top_ps=top_ps if (top_ps < 1).any() else None,
            min_ps=min_ps if min_ps.any() else None,
            seeds=table.seeds[rows] if is_random else None,
            choice_indices=table.choice_indices[rows] if is_random else None,
            output_positions=sampled.output_positions if is_random else None,
        )

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Draw a token per row of `logits`, fp32 [num_rows, vocab_size].

        `batch` holds tensors on the device of `logits`. Does not wait for the device.

        Returns:
            int64 [num_rows]; INVALID_TOKEN_ID where the row has a NaN or +inf, or nothing but -inf.
        """
        uniforms = uniforms_of(batch)
        return sample_tokens(logits, batch.temperatures, batch.top_ks, batch.top_ps, batch.min_ps, uniforms)

    def ends_of(self, table: SamplingTable, row: int) -> frozenset[int]:
        """Return what may end the request of `row`; ids beyond the vocabulary may be among it, but cannot occur."""
        return self.eos_token_ids.union(table.stop_token_ids[row])

    def masked_candidates(self, sampled: SamplingRows) -> np.ndarray | None:
        """List the tokens that would end a request before its min_tokens, for rows that list candidates.

        Returns:
            int64 [2, num_masked], rows and token ids; None when there are none.
        """
        table, rows = sampled.table, sampled.rows
        pairs = [
            (index, token_id)
            for index in np.flatnonzero(sampled.output_positions < table.min_tokens[rows]).tolist()
            for token_id in self.ends_of(table, rows[index])
            if token_id < self.vocab_size
        ]
        return np.ascontiguousarray(np.array(pairs, np.int64).T) if pairs else None


def make_candidates(token_ids: np.ndarray, logprobs: np.ndarray, nums_candidates: Sequence[int]) -> list[Candidates]:
    """Cut what `likeliest_tokens` listed for each row to what the row asked for, and to what there is.

    Args:
        token_ids: int64 [num_rows, num], INVALID_TOKEN_ID where a row has no more.
        logprobs: fp32 [num_rows, num].
        nums_candidates: that each row asked for.

    Returns:
        One per row; without tokens for a row that is no distribution.
    """
    nums_possible = (token_ids >= 0).sum(-1).tolist()
    return [
        Candidates(ids[: min(num, num_possible)], values[: min(num, num_possible)])
        for ids, values, num, num_possible in zip(
            token_ids.tolist(), logprobs.tolist(), nums_candidates, nums_possible, strict=True
        )
    ]
