import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.kernels.ops.philox import philox_uniform
from octavo.kernels.ops.sampling import INVALID_TOKEN_ID
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import Candidates
from octavo.worker.sampler import Sampler, SamplingBatch, SamplingRows, make_candidates, uniforms_of
from octavo.worker.sampling_table import SamplingTable

VOCAB_SIZE = 300
EOS = 2


class Row(NamedTuple):
    params: SamplingParams
    output_position: int


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(VOCAB_SIZE, (EOS,))


def row(output_position: int = 0, **options: object) -> Row:
    return Row(SamplingParams(max_tokens=100, **options), output_position)


def rows_of(*rows: Row) -> SamplingRows:
    """The rows in a table that holds them the other way round."""
    table, indices = SamplingTable(len(rows)), np.arange(len(rows))[::-1].copy()
    for index, each in zip(indices.tolist(), rows, strict=True):
        table.assign(index, each.params)
    return SamplingRows(table, indices, np.array([each.output_position for each in rows], np.int64))


def options_of(sampler: Sampler, *rows: Row) -> SamplingBatch:
    options = sampler.prepare(rows_of(*rows))
    return SamplingBatch(*(None if option is None else torch.from_numpy(option) for option in options))


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def sample(sampler: Sampler, logits: torch.Tensor, *rows: Row) -> list[int]:
    token_ids = sampler.sample(logits.clone(), options_of(sampler, *rows))
    assert (token_ids >= 0).all()
    assert token_ids.dtype == torch.int64
    return token_ids.tolist()


def test_what_no_row_asks_for_is_not_built(sampler: Sampler) -> None:
    batch = sampler.prepare(rows_of(row(temperature=0), row()))
    assert (batch.top_ks, batch.top_ps, batch.min_ps) == (None, None, None)

    batch = sampler.prepare(rows_of(row(), row(top_k=4, min_p=0.5), row(top_p=0.5)))
    assert batch.top_ks.tolist() == [0, 4, 0]
    assert batch.top_ps.tolist() == [1.0, 1.0, 0.5]
    assert batch.min_ps.tolist() == [0.0, 0.5, 0.0]


def test_the_random_number_is_a_function_of_seed_choice_and_position(sampler: Sampler) -> None:
    rows = [row(5, seed=2**63 - 1, choice_index=3), row(6, seed=2**63 - 1, choice_index=3), row(5, seed=1)]
    expected = philox_uniform(
        torch.tensor([2**63 - 1, 2**63 - 1, 1]), torch.tensor([3, 3, 0]), torch.tensor([5, 6, 5]), torch.zeros(3).long()
    )
    assert torch.equal(uniforms_of(options_of(sampler, *rows)), expected)


def test_a_rows_token_does_not_depend_on_its_neighbours(sampler: Sampler) -> None:
    rows = [
        row(0, seed=1),
        row(9, temperature=0),
        row(3, seed=2, top_k=5, temperature=2.0),
        row(1, seed=3, top_p=0.4),
        row(0, seed=4, min_p=0.2),
        row(2, seed=5, choice_index=2),
    ]
    logits = random_logits(len(rows))
    together = sample(sampler, logits, *rows)
    for index, each in enumerate(rows):
        assert sample(sampler, logits[index : index + 1], each) == [together[index]]
    assert sample(sampler, logits.flip(0), *reversed(rows)) == together[::-1]


def test_choices_and_positions_draw_differently(sampler: Sampler) -> None:
    logits = torch.zeros(60, VOCAB_SIZE)
    rows = [row(position, seed=11, choice_index=choice) for position in range(20) for choice in range(3)]
    assert len(set(sample(sampler, logits, *rows))) > 40


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("token_id", [0, EOS, VOCAB_SIZE - 1])
def test_a_row_with_bad_logits_fails_alone(
    sampler: Sampler, bad: float, options: dict[str, float], token_id: int
) -> None:
    rows = [row(seed=1), row(seed=2, **options), row(seed=3)]
    logits = random_logits(3)
    expected = sample(sampler, logits, *rows)
    logits[1, token_id] = bad

    assert sampler.sample(logits, options_of(sampler, *rows)).tolist() == [expected[0], INVALID_TOKEN_ID, expected[2]]


def test_a_row_with_nothing_left_to_draw_is_invalid(sampler: Sampler) -> None:
    logits = torch.full((1, VOCAB_SIZE), -math.inf)
    assert sampler.sample(logits, options_of(sampler, row())).tolist() == [INVALID_TOKEN_ID]


def test_a_step_that_samples_nothing(sampler: Sampler) -> None:
    assert sample(sampler, torch.empty(0, VOCAB_SIZE)) == []


def candidates(sampler: Sampler, logits: torch.Tensor, *rows: Row) -> list[Candidates]:
    masked = sampler.masked_candidates(rows_of(*rows))
    nums = [each.params.num_candidates for each in rows]
    token_ids, logprobs = likeliest_tokens(logits, max(nums), None if masked is None else torch.from_numpy(masked))
    return make_candidates(token_ids.numpy(), logprobs.numpy(), nums)


def test_each_row_lists_as_many_candidates_as_it_asked_for(sampler: Sampler) -> None:
    """By raw logprobs: temperature and filters have no say."""
    logits = random_logits(3)
    rows = [row(num_candidates=2, temperature=0.1, top_k=1), row(num_candidates=7, top_p=0.01), row(num_candidates=1)]
    best = logits.log_softmax(-1).topk(7)
    for index, (each, listed) in enumerate(zip(rows, candidates(sampler, logits, *rows), strict=True)):
        num = each.params.num_candidates
        assert listed.token_ids == best.indices[index, :num].tolist()
        assert listed.logprobs == best.values[index, :num].tolist()
        assert candidates(sampler, logits[index : index + 1], each) == [listed]


def test_candidates_that_min_tokens_forbids_are_left_out_and_the_others_keep_their_logprobs(sampler: Sampler) -> None:
    logits = random_logits(2)
    logits[:, EOS], logits[:, 7], logits[:, 9] = 30.0, 20.0, 10.0
    options = {"min_tokens": 2, "stop_token_ids": (7, VOCAB_SIZE + 5), "num_candidates": 3}
    early, late = candidates(sampler, logits, row(1, **options), row(2, **options))
    assert late.token_ids[:3] == [EOS, 7, 9]
    assert early.token_ids[0] == 9
    assert len(early.token_ids) == 3
    assert early.logprobs[0] == logits[0].log_softmax(-1)[9].item()


def test_there_are_no_more_candidates_than_possible_tokens(sampler: Sampler) -> None:
    logits = torch.full((2, VOCAB_SIZE), -math.inf)
    logits[:, [5, EOS, 4]] = torch.tensor([1.0, 2.0, 3.0])
    rows = [row(num_candidates=1000), row(num_candidates=2, min_tokens=1)]
    assert [each.token_ids for each in candidates(sampler, logits, *rows)] == [[4, EOS, 5], [4, 5]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("token_id", [0, EOS, VOCAB_SIZE - 1])
def test_a_row_with_bad_logits_has_no_candidates(sampler: Sampler, bad: float, token_id: int) -> None:
    logits = random_logits(3)
    rows = [row(num_candidates=4, min_tokens=1)] * 3
    expected = candidates(sampler, logits, *rows)
    logits[1, token_id] = bad
    assert candidates(sampler, logits, *rows) == [expected[0], Candidates([], []), expected[2]]
