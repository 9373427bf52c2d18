"""edit_logits on the CPU: the bits of the reference, and of each row alone among any other rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import cpu_kernels
import pytest
import torch

from octavo.kernels.cpu.logits_edits import cpu_edit_logits
from octavo.kernels.ops.logits_edits import IN_PROMPT, RowEdits, edit_logits

INF = math.inf
REFERENCE = edit_logits.implementations["torch"]
KINDS = ("mask", "ban", "bias", "penalties")
NUM_TABLE_ROWS = 5


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """With zeros of both signs, impossible tokens, and rows that are no distributions."""
    logits = torch.randn(num_rows, vocab_size, generator=generator(seed)) * 4
    for special in (0.0, -0.0, -INF):
        logits[torch.rand(logits.shape, generator=generator(seed + 1)) < 0.05] = special
        seed += 1
    logits[num_rows // 2, vocab_size // 3] = math.nan
    logits[num_rows // 3, vocab_size // 2] = INF
    return logits


def make_counts(vocab_size: int, share: float) -> torch.Tensor:
    """Counts of about `share` of the tokens, some of them large, half with the prompt's bit."""
    shape = (NUM_TABLE_ROWS, vocab_size)
    counts = torch.randint(0, 4, shape, generator=generator(5), dtype=torch.int32)
    counts[torch.rand(shape, generator=generator(6)) < 0.01] = 2**31 - 1
    counts[torch.rand(shape, generator=generator(7)) < 0.5] |= IN_PROMPT
    return counts.masked_fill_(torch.rand(shape, generator=generator(8)) > share, 0)


def make_pairs(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """A tenth of all pairs, in no order."""
    places = torch.randperm(num_rows * vocab_size, generator=generator(seed))[: num_rows * vocab_size // 10 + 1]
    return torch.stack((places // vocab_size, places % vocab_size))


def make_edits(num_rows: int, vocab_size: int, kinds: Sequence[str], share: float = 0.3) -> RowEdits:
    """Edits of some rows each; a row of a table may be that of several rows, or of none."""
    table_rows = torch.randint(-1, NUM_TABLE_ROWS, (2, num_rows), generator=generator(1))
    edits = RowEdits()
    if "mask" in kinds:
        words = torch.randint(-(2**31), 2**31, (NUM_TABLE_ROWS, -(-vocab_size // 32)), generator=generator(2)).int()
        words[torch.rand(words.shape, generator=generator(3)) < 0.3] = -1
        edits = edits._replace(bitmask=words, mask_rows=table_rows[0])
    if "ban" in kinds:
        edits = edits._replace(banned=make_pairs(num_rows, vocab_size, 10))
    if "bias" in kinds:
        pairs = make_pairs(num_rows, vocab_size, 11)
        edits = edits._replace(bias=(pairs, torch.randn(pairs.shape[1], generator=generator(12)) * 50))
    if "penalties" in kinds:
        repetition, presence, frequency = torch.rand(3, num_rows, generator=generator(13)) * 2 - 0.5
        edits = edits._replace(
            counts=make_counts(vocab_size, share),
            count_rows=table_rows[1],
            repetition=repetition + 0.6,
            presence=presence,
            frequency=frequency,
        )
    return edits


def bits_of(logits: torch.Tensor) -> torch.Tensor:
    """NaN has one form: whose sign and payload it is, is not promised."""
    return logits.masked_fill(logits.isnan(), math.nan).view(torch.int32)


def edited(logits: torch.Tensor, edits: RowEdits) -> torch.Tensor:
    result = logits.clone()
    cpu_edit_logits(result, edits)
    return result


def assert_equals_reference(logits: torch.Tensor, edits: RowEdits) -> None:
    expected = logits.clone()
    REFERENCE(expected, edits)
    assert torch.equal(bits_of(edited(logits, edits)), bits_of(expected))


@pytest.mark.parametrize("kinds", [(), *((kind,) for kind in KINDS), KINDS], ids=lambda kinds: "+".join(kinds))
@pytest.mark.parametrize("vocab_size", [1, 16, 31, 32, 70, 8192, 20_011])
def test_bits_are_the_references(each_isa, kinds: Sequence[str], vocab_size: int) -> None:
    for num_rows in (1, 9):
        assert_equals_reference(make_logits(num_rows, vocab_size), make_edits(num_rows, vocab_size, kinds))


@pytest.mark.parametrize("share", [0.0, 0.001, 1.0])
def test_counts_of_few_and_of_all_tokens(each_isa, share: float) -> None:
    assert_equals_reference(make_logits(7, 9000), make_edits(7, 9000, KINDS, share))


def test_what_is_outside_of_the_rows_is_left_alone(executor) -> None:
    around = torch.full((7, 75), 3.5)
    edits = make_edits(5, 75, KINDS)
    cpu_edit_logits(around[1:6], edits)
    assert around[[0, 6]].eq(3.5).all()
    assert not around[1:6].eq(3.5).all()


def test_rows_are_independent(each_isa) -> None:
    vocab_size, num_rows = 700, 512
    tables = make_edits(1, vocab_size, ("mask", "penalties"))
    table_rows = torch.randint(-1, NUM_TABLE_ROWS, (2, num_rows), generator=generator(20))
    options = torch.rand(3, num_rows, generator=generator(21)) + 0.1
    token_ids = torch.rand(num_rows, vocab_size, generator=generator(22)).argsort(-1)[:, :6].contiguous()
    biases = torch.randn(num_rows, 3, generator=generator(23))

    def edit(logits, mask_rows, count_rows, repetition, presence, frequency, token_ids, biases):
        rows = torch.arange(len(logits)).repeat_interleave(3)
        banned, biased = (torch.stack((rows, ids.flatten())) for ids in (token_ids[:, :3], token_ids[:, 3:]))
        edits = RowEdits(tables.bitmask, mask_rows, banned, (biased, biases.flatten()), tables.counts, count_rows)
        return edited(logits, edits._replace(repetition=repetition, presence=presence, frequency=frequency))

    rows = [make_logits(num_rows, vocab_size), *table_rows, *options, token_ids, biases]
    cpu_kernels.assert_rows_are_independent(edit, [each.contiguous() for each in rows])


def test_nan_stays_and_a_forbidden_infinity_becomes_one(each_isa) -> None:
    logits = torch.tensor([[math.nan, INF, 1.0, -INF, 2.0]]).expand(3, 5).contiguous()
    banned = torch.stack((torch.zeros(4, dtype=torch.int64), torch.arange(4)))
    edits = RowEdits(
        bitmask=torch.tensor([[0b10000]], dtype=torch.int32), mask_rows=torch.tensor([-1, 0, -1]), banned=banned
    )
    for row in edited(logits, edits)[:2]:
        assert row.isnan().tolist() == [True, True, False, False, False]
        assert row[2:].tolist() == [-INF, -INF, 2.0]
    assert edited(logits, edits)[2, 1:].tolist() == [INF, 1.0, -INF, 2.0]


def test_a_step_without_rows(each_isa) -> None:
    cpu_edit_logits(torch.empty(0, 100), make_edits(0, 100, ("mask", "penalties")))


@pytest.mark.parametrize(
    "edits",
    [
        RowEdits(banned=torch.tensor([[2], [0]])),
        RowEdits(banned=torch.tensor([[0], [40]])),
        RowEdits(banned=torch.tensor([[-1], [0]])),
        RowEdits(bias=(torch.tensor([[0], [-1]]), torch.ones(1))),
        RowEdits(bitmask=torch.zeros(3, 2, dtype=torch.int32), mask_rows=torch.tensor([0, 3])),
        make_edits(2, 40, ("penalties",))._replace(count_rows=torch.tensor([NUM_TABLE_ROWS, 0])),
    ],
)
def test_what_is_outside_of_a_table_is_refused(each_isa, edits: RowEdits) -> None:
    with pytest.raises(IndexError):
        cpu_edit_logits(torch.zeros(2, 40), edits)


@pytest.mark.parametrize("edits", [make_edits(3, 40, (kind,)) for kind in ("mask", "penalties")])
@pytest.mark.parametrize("shape", [(4, 40), (2, 40), (3, 80)])
def test_edits_of_other_rows_or_another_vocabulary_are_refused(executor, edits: RowEdits, shape) -> None:
    with pytest.raises(ValueError, match="edits are not those of"):
        cpu_edit_logits(torch.zeros(shape), edits)


def test_a_bias_without_its_number_is_refused(executor) -> None:
    pairs = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="edits are not those of"):
        cpu_edit_logits(torch.zeros(1, 40), RowEdits(bias=(pairs, torch.zeros(2))))


def test_logits_with_gaps_are_refused_because_they_cannot_be_changed_in_place(each_isa) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        cpu_edit_logits(torch.zeros(4, 40)[:, ::2], RowEdits())
