"""What the rows of a step change about their logits: on the host it becomes arrays, on the device it is done.

Forbidden tokens, bias and penalties, in the order of `SamplingParams`. A step in which no row asks for any has no
arrays and does nothing. What follows from the tokens so far is either kept on the device, which has all of them
(penalties), or left to it as a condition (bad words). So nothing here waits for the step before, but for the tokens of
rows that follow a grammar (`grammar_masks`).

Invariant: what a row may give next is a function of its request's options and output. So a row that got no token can
be asked afterwards, when all is known, whether its own options left it none. Rejected: a look for what is left over,
on the device, in each step that forbids something.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from octavo.kernels.ops.logits_edits import RowEdits, edit_logits
from octavo.protocol.engine_messages import ErrorCode
from octavo.worker.bad_words import Forbidden, forbidden_next, longest_beginning
from octavo.worker.device import Device
from octavo.worker.grammar import NO_GRAMMARS, Grammars
from octavo.worker.grammar_masks import GrammarMasks
from octavo.worker.penalty_counts import PenaltyCounts
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler, SamplingRows
from octavo.worker.sampling_table import SamplingTable
from octavo.worker.token_masks import TokenMasks, unpack_bits

Array = Any  # np.ndarray on the host, torch.Tensor on the device


class EditBatch(NamedTuple):
    """What the D rows that draw a token change; None where no row does.

    Made of arrays on the host, then of tensors on the device with the same names. Rows are those of the logits.

    Attributes:
        banned: int64 [2, num_banned], rows and token ids that must not be drawn; each pair once.
        conditions: int64 [4, num_conditions], rows, token ids that must not be drawn, and when: row of the worker, and
            what its last token has to be.
        bias_places: int64 [2, num_biased], rows and token ids; each pair once.
        bias_values: fp32 [num_biased].
        mask_rows: int64 [D], row of the worker whose mask applies; -1 for none.
        count_rows: int64 [D], row of the worker whose counts apply, and count what is drawn; -1 for none.
        repetition, presence, frequency: fp32 [D], None like `count_rows`.
    """

    banned: Array | None = None
    conditions: Array | None = None
    bias_places: Array | None = None
    bias_values: Array | None = None
    mask_rows: Array | None = None
    count_rows: Array | None = None
    repetition: Array | None = None
    presence: Array | None = None
    frequency: Array | None = None


NO_EDITS = EditBatch()


class LogitsEdits:
    """The edits of a rank that has logits."""

    def __init__(
        self, states: RequestStates, sampler: Sampler, device: Device, grammars: Grammars = NO_GRAMMARS
    ) -> None:
        """`sampler` says which tokens there are, and which ones end requests."""
        self.states = states
        self.sampler = sampler
        self.masks = TokenMasks(states.num_rows, sampler.vocab_size, device)
        self.grammar_masks = GrammarMasks(self.masks, grammars, states, device)
        self.counts = PenaltyCounts(states.num_rows, sampler.vocab_size, device)

    def assign(self, row: int) -> None:
        """Bring to the device what it needs of a row that was assigned; does not wait for it."""
        states, table = self.states, self.states.sampling
        self.grammar_masks.assign(row)
        if table.allowed_token_ids[row]:
            self.masks.assign(row, table.allowed_token_ids[row])
        if table.has_penalties[row]:
            num_prompt_tokens, num_tokens = states.num_prompt_tokens[row], states.num_tokens[row]
            token_ids = states.token_ids[row, :num_tokens]
            self.counts.assign(row, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:])

    def prepare(self, sampled: SamplingRows) -> EditBatch:
        """Gather what the rows of one step ask for, as arrays on the host; NO_EDITS when they ask for nothing."""
        table, rows = sampled.table, sampled.rows
        is_edited = table.has_edits[rows] | (sampled.output_positions < table.min_tokens[rows])
        if not is_edited.any():
            return NO_EDITS
        edited = np.flatnonzero(is_edited)
        return EditBatch(
            *self._forbidden_arrays(sampled, edited),
            *self._bias_arrays(table, rows, edited),
            _mask_rows(table, rows, edited),
            *_penalty_arrays(table, rows),
        )

    def apply(self, logits: torch.Tensor, batch: EditBatch, last_token_ids: torch.Tensor) -> None:
        """Change the first rows of `logits`, fp32 [at least D, vocab_size], in place.

        Args:
            batch: tensors on the device of `logits`.
            last_token_ids: int64 [num_rows], each row's last token.
        """
        self.grammar_masks.finish()
        if batch.conditions is not None:
            rows, token_ids, last_rows, expected_ids = batch.conditions
            is_met = last_token_ids[last_rows] == expected_ids
            changes = logits.new_zeros(len(is_met)).masked_fill_(is_met, -torch.inf)
            logits.index_put_((rows, token_ids), changes, accumulate=True)  # two words may end with one token
        has_bias, has_counts = batch.bias_places is not None, batch.count_rows is not None
        edits = RowEdits(
            bitmask=None if batch.mask_rows is None else self.masks.bits,
            mask_rows=batch.mask_rows,
            banned=batch.banned,
            bias=(batch.bias_places, batch.bias_values) if has_bias else None,
            counts=self.counts.counts if has_counts else None,
            count_rows=batch.count_rows,
            repetition=batch.repetition,
            presence=batch.presence,
            frequency=batch.frequency,
        )
        edit_logits(logits, edits)

    def count(self, batch: EditBatch, token_ids: torch.Tensor) -> None:
        """Count the tokens int64 [D] that the rows of a step have drawn."""
        if batch.count_rows is not None:
            self.counts.add(batch.count_rows, token_ids)

    def why_no_token(self, row: int, output_position: int) -> ErrorCode:
        """Return why `row` got no token at this place; its output before it has to be known."""
        if self.grammar_masks.has_failed(row, output_position):
            return ErrorCode.GRAMMAR_FAILED
        if self.is_any_token_allowed(row, output_position):
            return ErrorCode.NUMERICAL_ERROR
        return ErrorCode.NOTHING_ALLOWED

    def is_any_token_allowed(self, row: int, output_position: int) -> bool:
        """Return whether the options of `row` left it a token at this place; its output before it has to be known."""
        allowed = self.states.sampling.allowed_token_ids[row] or range(self.sampler.vocab_size)
        mask = self.grammar_masks.allowed_at(row, output_position)
        if mask is not None:
            allowed = unpack_bits(mask)
        forbidden = self._forbidden(row, output_position).token_ids
        return any(i not in forbidden for i in allowed if i < self.sampler.vocab_size)

    def _forbidden(self, row: int, output_position: int) -> Forbidden:
        """Return what bad words and `min_tokens` forbid; ids beyond the vocabulary may be among it."""
        states, table = self.states, self.states.sampling
        words = table.bad_words[row]
        start = states.num_prompt_tokens[row]
        num_looked_at = min(longest_beginning(words), output_position)
        end = states.token_ids[row, start + output_position - num_looked_at : start + output_position]
        forbidden = forbidden_next(words, end.tolist())
        if output_position < table.min_tokens[row]:
            forbidden.token_ids.update(self.sampler.ends_of(table, row))
        return forbidden

    def _forbidden_arrays(
        self, sampled: SamplingRows, edited: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return `banned` and `conditions`."""
        vocab_size = self.sampler.vocab_size
        banned: list[tuple[int, int]] = []
        conditions: list[tuple[int, int, int, int]] = []
        for index in edited.tolist():
            row = int(sampled.rows[index])
            forbidden = self._forbidden(row, int(sampled.output_positions[index]))
            banned += [(index, token_id) for token_id in forbidden.token_ids if token_id < vocab_size]
            conditions += [
                (index, token_id, row, last_id) for last_id, token_id in forbidden.conditions if token_id < vocab_size
            ]
        return _columns(banned), _columns(conditions)

    def _bias_arrays(
        self, table: SamplingTable, rows: np.ndarray, edited: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return `bias_places` and `bias_values`."""
        biases = [(index, table.logit_bias[rows[index]]) for index in edited.tolist()]
        biases = [(index, bias) for index, bias in biases if len(bias)]
        if not biases:
            return None, None
        nums_biased = [len(bias) for _, bias in biases]
        indices = np.repeat(np.array([index for index, _ in biases], np.int64), nums_biased)
        entries = np.concatenate([bias for _, bias in biases])
        is_token = entries["token_id"] < self.sampler.vocab_size
        if not is_token.any():
            return None, None
        entries = entries[is_token]
        return np.stack((indices[is_token], entries["token_id"])), entries["value"].copy()


def edit_batch(tensors: dict[str, torch.Tensor]) -> EditBatch:
    """Return the edits of uploaded arrays; NO_EDITS when there are none."""
    batch = EditBatch(*map(tensors.get, EditBatch._fields))
    return batch if any(part is not None for part in batch) else NO_EDITS


def _columns(tuples: list[tuple[int, ...]]) -> np.ndarray | None:
    return np.ascontiguousarray(np.array(tuples, np.int64).T) if tuples else None


def _mask_rows(table: SamplingTable, rows: np.ndarray, edited: np.ndarray) -> np.ndarray | None:
    is_masked = table.has_grammar[rows]
    masked = [index for index in edited.tolist() if is_masked[index] or table.allowed_token_ids[rows[index]]]
    if not masked:
        return None
    mask_rows = np.full(len(rows), -1)
    mask_rows[masked] = rows[masked]
    return mask_rows


def _penalty_arrays(table: SamplingTable, rows: np.ndarray) -> tuple[np.ndarray | None, ...]:
    """Return `count_rows`, `repetition`, `presence`, `frequency`."""
    has_penalties = table.has_penalties[rows]
    if not has_penalties.any():
        return None, None, None, None
    return (
        np.where(has_penalties, rows, -1),
        table.repetition_penalties[rows],
        table.presence_penalties[rows],
        table.frequency_penalties[rows],
    )
