"""The edits of logits against a formula for one token at a time, from the tokens of prompt and output themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logits_edits_cases import counts_of, pack_masks

from octavo.kernels.ops.logits_edits import ROWS_AT_A_TIME, RowEdits, edit_logits
from octavo.kernels.ops.sampling import INVALID_TOKEN_ID, sample_tokens

INF = math.inf
VOCAB_SIZE = 37  # more than a word of a mask, and no whole number of them
TOKENS = st.integers(0, VOCAB_SIZE - 1)
LOGITS = st.lists(st.floats(-50, 50, width=32) | st.just(-INF), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
ROW = st.fixed_dictionaries(
    {
        "logits": LOGITS,
        "allowed": st.none() | st.sets(TOKENS, min_size=1),
        "banned": st.sets(TOKENS, max_size=4),
        "bias": st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4),
        "penalties": st.none()
        | st.tuples(*(st.floats(low, 2, width=32) for low in (0.5, -2, -2)), *[st.lists(TOKENS, max_size=12)] * 2),
    }
)


def plain(row: dict) -> list[np.float32]:
    """Edit one row token by token."""
    result = [np.float32(logit) for logit in row["logits"]]
    for token_id in range(VOCAB_SIZE):
        if token_id in row["banned"] or (row["allowed"] is not None and token_id not in row["allowed"]):
            result[token_id] = np.float32(-INF)
        result[token_id] += np.float32(row["bias"].get(token_id, 0))
        if row["penalties"] is None:
            continue
        repetition, presence, frequency, prompt, output = row["penalties"]
        if token_id in prompt or token_id in output:
            is_positive = result[token_id] > 0
            result[token_id] = (
                result[token_id] / np.float32(repetition) if is_positive else result[token_id] * np.float32(repetition)
            )
        if token_id in output:
            result[token_id] -= np.float32(frequency) * np.float32(output.count(token_id))
            result[token_id] -= np.float32(presence)
    return result


def pairs_of(rows: list[dict], name: str) -> torch.Tensor | None:
    pairs = [(index, token_id) for index, row in enumerate(rows) for token_id in row[name]]
    return torch.tensor(pairs).t().contiguous() if pairs else None


def edits_of(rows: list[dict]) -> RowEdits:
    masked = [index for index, row in enumerate(rows) if row["allowed"] is not None]
    counted = [index for index, row in enumerate(rows) if row["penalties"] is not None]
    options = [row["penalties"] or (0.5, 1.0, 1.0, [], []) for row in rows]
    biased = pairs_of(rows, "bias")
    return RowEdits(
        bitmask=pack_masks([rows[index]["allowed"] for index in masked], VOCAB_SIZE) if masked else None,
        mask_rows=torch.tensor([masked.index(i) if i in masked else -1 for i in range(len(rows))]) if masked else None,
        banned=pairs_of(rows, "banned"),
        bias=None if biased is None else (biased, torch.tensor([v for row in rows for v in row["bias"].values()])),
        counts=counts_of([options[index][3:] for index in counted], VOCAB_SIZE) if counted else None,
        count_rows=torch.tensor([counted.index(i) if i in counted else -1 for i in range(len(rows))]),
        repetition=torch.tensor([each[0] for each in options]),
        presence=torch.tensor([each[1] for each in options]),
        frequency=torch.tensor([each[2] for each in options]),
    )


@given(rows=st.lists(ROW, min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_each_token_is_edited_as_the_formula_says(rows):
    logits = torch.tensor([row["logits"] for row in rows])
    edit_logits(logits, edits_of(rows))
    np.testing.assert_array_equal(logits.numpy(), np.array([plain(row) for row in rows]))


def test_nothing_asked_is_nothing_done():
    logits = torch.tensor([[1.0, -0.0, math.nan, -INF]])
    before = logits.clone()
    edit_logits(logits, RowEdits())
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("num_rows", [ROWS_AT_A_TIME, 2 * ROWS_AT_A_TIME + 3])
def test_many_rows_are_edited_like_single_ones(num_rows):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator)
    bitmask = torch.randint(-(2**31), 2**31, (num_rows, 2), generator=generator).int()
    counts = torch.randint(0, 3, (num_rows, VOCAB_SIZE), generator=generator).int()
    options = 0.5 + torch.rand(3, num_rows, generator=generator)
    rows = torch.randperm(num_rows, generator=generator)
    together = logits.clone()
    edit_logits(
        together, RowEdits(bitmask=bitmask, mask_rows=rows, counts=counts, count_rows=rows.flip(0), **named(options))
    )
    for row in range(num_rows):
        alone = logits[row : row + 1].clone()
        mask_rows, count_rows = rows[row : row + 1], rows.flip(0)[row : row + 1]
        own = named(options[:, row : row + 1])
        edit_logits(alone, RowEdits(bitmask=bitmask, mask_rows=mask_rows, counts=counts, count_rows=count_rows, **own))
        assert torch.equal(alone[0], together[row])


def named(options: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(("repetition", "presence", "frequency"), options, strict=True))


@pytest.mark.parametrize("fault", [math.nan, INF])
def test_a_row_that_is_no_distribution_is_still_reported_when_the_fault_is_forbidden(fault):
    for edits in (
        RowEdits(banned=torch.tensor([[1], [2]])),
        RowEdits(bitmask=pack_masks([{0, 1}], 5), mask_rows=torch.tensor([-1, 0])),
    ):
        logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 1.0, fault, 3.0, 4.0]])
        edit_logits(logits, edits)
        drawn = sample_tokens(logits, torch.zeros(2), None, None, None, torch.zeros(2).double())
        assert drawn.tolist() == [4, INVALID_TOKEN_ID]


def test_a_row_without_any_allowed_token_has_none_to_draw():
    logits = torch.zeros(2, 40)
    edit_logits(logits, RowEdits(bitmask=pack_masks([set()], 40), mask_rows=torch.tensor([0, -1])))
    drawn = sample_tokens(logits, torch.zeros(2), None, None, None, torch.zeros(2).double())
    assert drawn.tolist() == [INVALID_TOKEN_ID, 0]
