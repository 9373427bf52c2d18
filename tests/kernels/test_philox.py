import pytest
import torch

from octavo.kernels.ops.philox import philox_4x32, philox_uniform

KNOWN_ANSWERS = [  # (counter, key, answer), kat_vectors of Random123
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    assert philox_4x32(words(counter), words(key)) == words(answer)


def uniform(seed: int, choice_index: int = 0, position: int = 0, draw: int = 0) -> float:
    return philox_uniform(*(torch.tensor([n]) for n in (seed, choice_index, position, draw))).item()


def test_the_number_is_made_of_the_first_53_bits() -> None:
    assert uniform(0) == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53
    seed = (0x299F31D0 << 32) | 0xA4093822
    expected = philox_4x32(words("7 b d 0"), words("a4093822 299f31d0"))
    assert uniform(seed, 7, 11, 13) == ((expected[0].item() << 21) | (expected[1].item() >> 11)) / 2**53


def test_every_coordinate_matters() -> None:
    coordinates = [(1, 0, 0, 0), (1 << 40, 0, 0, 0), (2**63 - 1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    assert len({uniform(*each) for each in [(0, 0, 0, 0), *coordinates]}) == 7


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    positions = torch.arange(1000)
    zeros = torch.zeros_like(positions)
    together = philox_uniform(zeros + 5, zeros, positions, zeros)
    assert together.tolist() == [uniform(5, 0, position) for position in range(1000)]


def test_numbers_are_uniform() -> None:
    """Chi-square of 256 bins, 255 degrees of freedom: beyond 330 in one of a thousand runs with other seeds."""
    positions = torch.arange(100_000)
    zeros = torch.zeros_like(positions)
    numbers = philox_uniform(zeros + 123, zeros, positions, zeros)
    counts = torch.histc(numbers, 256, 0, 1)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert ((counts - 390.625) ** 2 / 390.625).sum() < 330
