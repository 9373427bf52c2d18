"""What a step's tensors are: the arrays that go to the device, in their order, and what the model is called with.

First stand the arrays whose sizes follow from the number of tokens and requests alone, so that a graph that was
captured for a number of requests finds them at its places; then the block tables; last what sampling needs.

A token that was sampled by a step whose result the host has not seen is `-1 - row` in `token_ids`. The device has the
last token of every row and puts it in (`resolve_token_ids`), so no step waits for the result of the one before it.
Rejected: a list of which tokens to put in where, because its length would change from step to step, which graphs do not
allow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from octavo.kernels.ops.attention import AttentionPlan, PlanCapacity
from octavo.worker.input_batch import InputBatch
from octavo.worker.layers.attention import AttentionMetadata
from octavo.worker.logits_edits import EditBatch, LogitsEdits
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler, SamplingBatch, SamplingRows

MASKED_CANDIDATES = "masked_candidates"
REPORTING = "reporting"
SPARE_BYTES = 2**20


class Choices(NamedTuple):
    """Who of a step's requests gets a token; S of them do, D by drawing, L as candidates for the engine core.

    Attributes:
        rows: int64 [S], in batch order.
        drawn, listed: int64 [D], [L], indices among the S.
        reporting: int64 [P], indices among the D, of those that report logprobs.
        tokens: int64 [S], the last token of each among the step's: first of those drawn, then of those listed.
        output_positions: int64 [S], in batch order: the index of the token in its request's output.
    """

    rows: np.ndarray
    drawn: np.ndarray
    listed: np.ndarray
    reporting: np.ndarray
    tokens: np.ndarray
    output_positions: np.ndarray


def make_choices(states: RequestStates, batch: InputBatch) -> Choices:
    """Sort the sampled requests of a step by how they get their token."""
    rows = batch.rows[batch.sampled_requests]
    is_listed = states.sampling.num_candidates[rows] > 0
    drawn, listed = np.flatnonzero(~is_listed), np.flatnonzero(is_listed)
    tokens = batch.sampled_tokens
    return Choices(
        rows=rows,
        drawn=drawn,
        listed=listed,
        reporting=np.flatnonzero(states.sampling.num_logprobs[rows[drawn]] >= 0),
        tokens=np.concatenate((tokens[drawn], tokens[listed])) if len(listed) else tokens,
        output_positions=states.num_tokens[rows] - states.num_prompt_tokens[rows],
    )


def forward_arrays(batch: InputBatch, plan: AttentionPlan | None) -> dict[str, np.ndarray]:
    """Return what the model needs."""
    arrays = {
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "slot_mapping": batch.slot_mapping,
        "query_start_loc": batch.query_start_loc,
        "seq_lens": batch.seq_lens,
    }
    if plan is not None:
        arrays |= {"work": plan.work.numpy(), "reductions": plan.reductions.numpy()}
    return arrays | {"block_tables": batch.block_tables}


def choice_arrays(
    states: RequestStates, sampler: Sampler, edits: LogitsEdits | None, choices: Choices
) -> dict[str, np.ndarray]:
    """Return what sampling needs; `edits` is None on the ranks that get no logits."""
    arrays = {"chosen_tokens": choices.tokens, "drawn_rows": choices.rows[choices.drawn]}
    if len(choices.drawn):
        sampled = _sampling_rows(states, choices, choices.drawn)
        arrays |= _present(sampler.prepare(sampled))
        arrays |= {} if edits is None else _present(edits.prepare(sampled))
    if len(choices.listed):
        masked = sampler.masked_candidates(_sampling_rows(states, choices, choices.listed))
        arrays |= {} if masked is None else {MASKED_CANDIDATES: masked}
    if len(choices.reporting):
        arrays[REPORTING] = choices.reporting
    return arrays


def _present(batch: SamplingBatch | EditBatch) -> dict[str, np.ndarray]:
    return {name: array for name, array in batch._asdict().items() if array is not None}


def _sampling_rows(states: RequestStates, choices: Choices, indices: np.ndarray) -> SamplingRows:
    return SamplingRows(states.sampling, choices.rows[indices], choices.output_positions[indices])


def attention_metadata(tensors: dict[str, torch.Tensor], plan: AttentionPlan | None) -> AttentionMetadata:
    """Return the metadata of uploaded arrays; `plan` is the one that was uploaded with them."""
    return AttentionMetadata(
        query_start_loc=tensors["query_start_loc"],
        seq_lens=tensors["seq_lens"],
        block_tables=tensors["block_tables"],
        slot_mapping=tensors["slot_mapping"],
        plan=None if plan is None else plan._replace(work=tensors["work"], reductions=tensors["reductions"]),
    )


def sampling_batch(tensors: dict[str, torch.Tensor]) -> SamplingBatch:
    """Return the options of uploaded arrays."""
    return SamplingBatch(*(tensors.get(name) for name in SamplingBatch._fields))


def resolve_token_ids(token_ids: torch.Tensor, last_token_ids: torch.Tensor) -> torch.Tensor:
    """Put in the tokens that only the device knows.

    Args:
        token_ids: int64 [T]; `-1 - row` stands for the last token of a row.
        last_token_ids: int64 [num_rows], on the device.

    Returns:
        int64 [T].
    """
    rows = (-1 - token_ids).clamp_(min=0)
    return torch.where(token_ids < 0, last_token_ids.index_select(0, rows), token_ids)


def plan_num_bytes(capacity: PlanCapacity) -> int:
    """Return the bytes of the arrays of a plan."""
    return 4 * 4 * (capacity.num_work + capacity.num_reductions)


def step_num_bytes(states: RequestStates, max_num_batched_tokens: int) -> int:
    """Return the bytes of the arrays of a step of so many tokens with every request that there may be, but its plan.

    What is not counted goes by itself when it does not fit: what requests do to their logits, and logprobs of prompts.
    """
    num_requests = states.num_requests
    token_bytes = 3 * 8 * max(max_num_batched_tokens, num_requests)
    request_bytes = num_requests * (15 * 8 + 4 * states.block_tables.shape[1])
    return token_bytes + request_bytes + SPARE_BYTES
