"""Logprobs on their way from a worker to the client: packed, so that the engine core passes them on unread.

Natural logarithms of the model's own distribution: before bias, penalties, masks and temperature. An entry is a token
and its logprob; a row has the token that was drawn (or stands in the prompt) first, then the likeliest ones, likeliest
first, equals by ascending id. Arrays of the standard library read them, because neither border process has numpy.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator

import msgspec

MAX_NUM_LOGPROBS = 20
NO_ENTRY = -1  # the token id where a row has no further entry; its logprob is -inf


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of 1 + num_listed entries.

    Attributes:
        num_listed: how many of the likeliest tokens stand behind each row's own.
        token_ids: int32, little endian, [num_rows, 1 + num_listed].
        logprobs: fp32, little endian, of the same shape.
    """

    num_listed: int
    token_ids: bytes
    logprobs: bytes

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) // (4 * (1 + self.num_listed))

    def rows(self) -> Iterator[tuple[list[int], list[float]]]:
        """Yield each row's token ids and logprobs."""
        token_ids, logprobs = array("i", self.token_ids), array("f", self.logprobs)
        if sys.byteorder == "big":
            token_ids.byteswap()
            logprobs.byteswap()
        width = 1 + self.num_listed
        for start in range(0, len(token_ids), width):
            yield token_ids[start : start + width].tolist(), logprobs[start : start + width].tolist()

    def tail(self, num_dropped: int) -> TokenLogprobs:
        """Return the rows behind the first `num_dropped`."""
        start = num_dropped * 4 * (1 + self.num_listed)
        return TokenLogprobs(self.num_listed, self.token_ids[start:], self.logprobs[start:])

    def joined(self, later: TokenLogprobs) -> TokenLogprobs:
        """Return these rows and then those of `later`, which has as many entries in a row."""
        if self.num_listed != later.num_listed:
            raise ValueError(f"rows of {later.num_listed} listed tokens behind rows of {self.num_listed}")
        return TokenLogprobs(self.num_listed, self.token_ids + later.token_ids, self.logprobs + later.logprobs)


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of neighbouring prompt tokens, each given those before it; position 0 has none.

    Attributes:
        first_position: of the first row's token in the prompt.
        rows: one for each token.
    """

    first_position: int
    rows: TokenLogprobs
