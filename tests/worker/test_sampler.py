import math

import pytest
import torch

from octavo.kernels.ops.philox import philox_uniform
from octavo.protocol.sampling_params import SamplingParams
from octavo.worker.sampler import Sampler, SamplingRow

VOCAB_SIZE = 300
EOS = 2


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(VOCAB_SIZE, (EOS,), torch.device("cpu"))


def row(output_position: int = 0, **options: object) -> SamplingRow:
    return SamplingRow(SamplingParams(max_tokens=100, **options), output_position)


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def sample(sampler: Sampler, logits: torch.Tensor, *rows: SamplingRow) -> list[int]:
    result = sampler.sample(logits.clone(), sampler.prepare(rows))
    assert not result.is_invalid.any()
    assert result.token_ids.dtype == torch.int64
    return result.token_ids.tolist()


def test_what_no_row_asks_for_is_not_built(sampler: Sampler) -> None:
    batch = sampler.prepare([row(temperature=0), row()])
    assert (batch.top_ks, batch.top_ps, batch.min_ps, batch.masked) == (None, None, None, None)

    batch = sampler.prepare([row(), row(top_k=4, min_p=0.5), row(top_p=0.5)])
    assert batch.top_ks.tolist() == [0, 4, 0]
    assert batch.top_ps.tolist() == [1.0, 1.0, 0.5]
    assert batch.min_ps.tolist() == [0.0, 0.5, 0.0]


def test_the_random_number_is_a_function_of_seed_choice_and_position(sampler: Sampler) -> None:
    rows = [row(5, seed=2**63 - 1, choice_index=3), row(6, seed=2**63 - 1, choice_index=3), row(5, seed=1)]
    expected = philox_uniform(
        torch.tensor([2**63 - 1, 2**63 - 1, 1]), torch.tensor([3, 3, 0]), torch.tensor([5, 6, 5]), torch.zeros(3).long()
    )
    assert torch.equal(sampler.prepare(rows).uniforms, expected)


def test_a_rows_token_does_not_depend_on_its_neighbours(sampler: Sampler) -> None:
    rows = [
        row(0, seed=1),
        row(9, temperature=0),
        row(3, seed=2, top_k=5, temperature=2.0),
        row(1, seed=3, top_p=0.4),
        row(0, seed=4, min_p=0.2, min_tokens=3, stop_token_ids=(7, 8)),
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


def test_no_end_before_min_tokens(sampler: Sampler) -> None:
    logits = random_logits(1)
    logits[0, EOS], logits[0, 7], logits[0, 9] = 30.0, 20.0, 10.0
    options = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (7, VOCAB_SIZE + 5)}
    assert sample(sampler, logits, row(0, **options)) == [9]
    assert sample(sampler, logits, row(1, **options)) == [9]
    assert sample(sampler, logits, row(2, **options)) == [EOS]


def test_min_tokens_of_one_row_leaves_the_others_alone(sampler: Sampler) -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, EOS] = 30.0
    rows = row(0, temperature=0), row(0, temperature=0, min_tokens=1), row(0, temperature=0)
    assert sample(sampler, logits, *rows) == [EOS, 0, EOS]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_p": 0.5}, {"min_tokens": 1}], ids=str)
@pytest.mark.parametrize("token_id", [0, EOS, VOCAB_SIZE - 1])
def test_a_row_with_bad_logits_fails_alone(
    sampler: Sampler, bad: float, options: dict[str, float], token_id: int
) -> None:
    """Also when the bad logit is one that is masked: the row's other logits are worth no more."""
    rows = [row(seed=1), row(seed=2, **options), row(seed=3)]
    logits = random_logits(3)
    expected = sample(sampler, logits, *rows)
    logits[1, token_id] = bad

    result = sampler.sample(logits, sampler.prepare(rows))

    assert result.is_invalid.tolist() == [False, True, False]
    assert result.token_ids[[0, 2]].tolist() == [expected[0], expected[2]]


def test_a_row_with_nothing_left_to_draw_is_invalid(sampler: Sampler) -> None:
    logits = torch.full((1, VOCAB_SIZE), -math.inf)
    logits[0, EOS] = 1.0
    assert sampler.sample(logits, sampler.prepare([row(min_tokens=1)])).is_invalid.tolist() == [True]


def test_a_step_that_samples_nothing(sampler: Sampler) -> None:
    assert sample(sampler, torch.empty(0, VOCAB_SIZE)) == []
