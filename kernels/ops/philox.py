"""Random numbers that are a pure function of their coordinates (Philox-4x32-10, Salmon et al., SC'11)."""

from __future__ import annotations

import torch

from octavo.kernels.registry import op

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, in 32 bits
WORD_MASK = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _multiply(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of the 64-bit product; int64 wraps around, so its bits are those of the unsigned product."""
    product = word * multiplier
    return (product >> 32) & WORD_MASK, product & WORD_MASK


def philox_4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return four random words for a counter of four words and a key of two; all are int64 below 2^32."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(NUM_ROUNDS):
        high_0, low_0 = _multiply(MULTIPLIERS[0], word_0)
        high_1, low_1 = _multiply(MULTIPLIERS[1], word_2)
        word_0, word_1, word_2, word_3 = high_1 ^ word_1 ^ key_0, low_1, high_0 ^ word_3 ^ key_1, low_0
        key_0, key_1 = (key_0 + KEY_INCREMENTS[0]) & WORD_MASK, (key_1 + KEY_INCREMENTS[1]) & WORD_MASK
    return word_0, word_1, word_2, word_3


@op
def philox_uniform(
    seeds: torch.Tensor, choice_indices: torch.Tensor, positions: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    """Return one number in [0, 1) per row, with 53 random bits.

    Args:
        seeds: int64 [num_rows], the 64-bit key.
        choice_indices: int64 [num_rows], below 2^32 as the next two; first word of the counter.
        positions: int64 [num_rows], index of the output token that is drawn; second word.
        draws: int64 [num_rows], which of the draws for that token; third word.

    Returns:
        float64 [num_rows].
    """
    key = (seeds & WORD_MASK, (seeds >> 32) & WORD_MASK)
    first, second, _, _ = philox_4x32((choice_indices, positions, draws, torch.zeros_like(positions)), key)
    return ((first << 21) | (second >> 11)).double() * 2.0**-53
