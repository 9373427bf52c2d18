"""What the tests of edits of logits make out of sets and lists of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from octavo.kernels.ops.logits_edits import IN_PROMPT, WORD_BITS


def pack_masks(allowed: Sequence[Iterable[int]], vocab_size: int) -> torch.Tensor:
    """Return int32 [len(allowed), words] with a bit for each allowed token."""
    masks = torch.zeros(len(allowed), -(-vocab_size // WORD_BITS), dtype=torch.int64)
    for mask, token_ids in zip(masks, allowed, strict=True):
        for token_id in token_ids:
            mask[token_id // WORD_BITS] |= 1 << token_id % WORD_BITS
    return torch.from_numpy(masks.numpy().astype(np.uint32).view(np.int32))


def counts_of(tokens: Sequence[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> torch.Tensor:
    """Return int32 [len(tokens), vocab_size], the counts for the tokens of each prompt and output."""
    counts = torch.zeros(len(tokens), vocab_size, dtype=torch.int32)
    for row, (prompt, output) in zip(counts, tokens, strict=True):
        for token_id, number in Counter(output).items():
            row[token_id] = number
        for token_id in set(prompt):
            row[token_id] |= IN_PROMPT
    return counts
