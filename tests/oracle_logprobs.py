"""The logprobs that the oracle must report, worked out on lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

from oracle import START, logprobs_row, pack_rows, slot_value

from octavo.protocol.logprobs import TokenLogprobs


def context_hashes(token_ids: Sequence[int]) -> Iterator[int]:
    """The hash of the first token, of the first two, and so on."""
    context, value = blake2b(digest_size=8), START
    for position, token_id in enumerate(token_ids):
        value = slot_value(token_id, position, value)
        context.update(value.to_bytes(8, "little"))
        yield int.from_bytes(context.digest(), "little")


def expected_logprobs(token_ids: Sequence[int], start: int, num_listed: int, vocab_size: int) -> TokenLogprobs:
    """Rows of the tokens from position `start` on, which is above 0."""
    hashes = context_hashes(token_ids[:-1])
    rows = [
        logprobs_row(context_hash, token_id, num_listed, vocab_size)
        for context_hash, token_id in zip(hashes, token_ids[1:], strict=True)
    ]
    return pack_rows(rows[start - 1 :], num_listed)
