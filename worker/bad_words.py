"""Which tokens a request's bad words forbid next.

A word of one token is forbidden always; of a longer one the last token is, where the output ends with the others. The
end of the output may be a token that was sampled by a step whose result the host has not seen. Then the host compares
what it knows, and the rest is a condition that the device decides, which has the token. So bad words make no step wait
for the one before. Rejected: waiting for that token after the forward pass was started, which leaves the device idle
between two passes for as long as the host takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BadWord = tuple[int, ...]


class Forbidden(NamedTuple):
    """What is forbidden next.

    Attributes:
        token_ids: in any case.
        conditions: (token id, forbidden token id): the second one, if the output ends with the first one.
    """

    token_ids: set[int]
    conditions: list[tuple[int, int]]


def longest_beginning(words: Sequence[BadWord]) -> int:
    """Return how many of the last output tokens decide what is forbidden."""
    return max(map(len, words), default=1) - 1


def forbidden_next(words: Sequence[BadWord], end: Sequence[int]) -> Forbidden:
    """Return what the words forbid behind an output.

    Args:
        end: the last tokens of the output, all or at least `longest_beginning(words)`; only the last of them may be
            negative: one that the host does not know.
    """
    forbidden = Forbidden(set(), [])
    for *beginning, last in words:
        size = len(beginning)
        if size == 0:
            forbidden.token_ids.add(last)
        elif size > len(end):
            continue
        elif end[-1] < 0:
            if list(end[-size:-1]) == beginning[:-1]:
                forbidden.conditions.append((beginning[-1], last))
        elif list(end[-size:]) == beginning:
            forbidden.token_ids.add(last)
    return forbidden
