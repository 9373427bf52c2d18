"""Which part of a layer a rank of a tensor-parallel group holds.

Everything is decided from sizes and the number of ranks, so that every rank knows the shares of all. Attention is cut
between heads, a KV head together with the query heads that read it. Where sizes do not divide, shares differ by one
head, or by one multiple that matrix products like; nothing is padded, so that no rank computes what nobody wants.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from octavo.protocol.lifecycle import ExitCode, StartupError

PREFERRED_MULTIPLE = 64  # a power of two: what the tiles of matrix products divide by
MIN_MULTIPLES_PER_RANK = 8  # fewer would make the largest share an eighth larger than the average, or more


class HeadShare(NamedTuple):
    """The heads of one rank: every one of `query_heads` reads one of `kv_heads`."""

    query_heads: range
    kv_heads: range


def _cannot_split(what: str, num_ranks: int) -> StartupError:
    return StartupError(
        ExitCode.USAGE, f"--tensor-parallel-size {num_ranks}: {what} cannot be split over so many ranks"
    )


def _runs(total: int, num_runs: int) -> list[range]:
    """Cut `total` into neighbouring runs that differ by one at most; the longer ones first."""
    length, num_longer = divmod(total, num_runs)
    starts = [index * length + min(index, num_longer) for index in range(num_runs + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def split_size(what: str, total: int, num_ranks: int) -> list[range]:
    """Return each rank's run of `total` rows or columns: equal ones, else whole multiples of a power of two.

    Raises StartupError(USAGE) with `what` in its text when there are fewer rows than ranks.
    """
    if total < num_ranks:
        raise _cannot_split(f"{what} {total}", num_ranks)
    if total % num_ranks == 0:
        return _runs(total, num_ranks)
    multiple = PREFERRED_MULTIPLE
    while multiple > 1 and total < MIN_MULTIPLES_PER_RANK * multiple * num_ranks:
        multiple //= 2
    runs = _runs(-(-total // multiple), num_ranks)
    return [range(run.start * multiple, min(run.stop * multiple, total)) for run in runs]


def split_heads(num_query_heads: int, num_kv_heads: int, num_ranks: int) -> list[HeadShare]:
    """Return each rank's heads.

    With fewer KV heads than ranks, several ranks hold the same one and share out its query heads. Raises
    StartupError(USAGE) when that leaves a rank without a query head.
    """
    num_readers = num_query_heads // num_kv_heads
    if num_kv_heads >= num_ranks:
        return [
            HeadShare(range(run.start * num_readers, run.stop * num_readers), run)
            for run in _runs(num_kv_heads, num_ranks)
        ]
    shares = []
    for kv_head, ranks in enumerate(_runs(num_ranks, num_kv_heads)):
        if len(ranks) > num_readers:
            raise _cannot_split(
                f"num_attention_heads {num_query_heads} with num_key_value_heads {num_kv_heads}", num_ranks
            )
        first = kv_head * num_readers
        shares += [
            HeadShare(range(first + run.start, first + run.stop), range(kv_head, kv_head + 1))
            for run in _runs(num_readers, len(ranks))
        ]
    return shares


def rows_of_heads(heads: range, head_dim: int) -> range:
    """Return the rows of a projection that belong to `heads`."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def check_split(
    num_query_heads: int, num_kv_heads: int, intermediate_size: int, vocab_size: int, num_ranks: int
) -> None:
    """Raise StartupError(USAGE) when a model of these sizes cannot be split over `num_ranks`."""
    split_heads(num_query_heads, num_kv_heads, num_ranks)
    split_size("intermediate_size", intermediate_size, num_ranks)
    split_size("vocab_size", vocab_size, num_ranks)
