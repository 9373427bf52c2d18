"""Who holds which heads, rows and columns."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.layers.shares import HeadShare, check_split, rows_of_heads, split_heads, split_size


def lengths(shares: list[range]) -> list[int]:
    return [len(share) for share in shares]


@given(total=st.integers(1, 300_000), num_ranks=st.integers(1, 64))
def test_every_row_has_one_rank_and_no_rank_is_idle(total, num_ranks):
    if total < num_ranks:
        with pytest.raises(StartupError, match=f"tensor-parallel-size {num_ranks}: rows {total}") as caught:
            split_size("rows", total, num_ranks)
        assert caught.value.exit_code is ExitCode.USAGE
        return
    shares = split_size("rows", total, num_ranks)
    assert shares[0].start == 0
    assert shares[-1].stop == total
    assert all(share.stop == other.start for share, other in itertools.pairwise(shares))
    assert min(lengths(shares)) > 0
    assert max(lengths(shares)) - min(lengths(shares)) <= max(1, total // (4 * num_ranks))
    if total % num_ranks == 0:
        assert set(lengths(shares)) == {total // num_ranks}


@pytest.mark.parametrize(
    ("total", "num_ranks", "expected"),
    [
        (1536, 1, [1536]),
        (1536, 2, [768, 768]),
        (49152, 3, [16384, 16384, 16384]),
        (32003, 2, [16064, 15939]),  # multiples of 64, but for the end
        (80, 3, [28, 26, 26]),
        (5, 3, [2, 2, 1]),
    ],
)
def test_shares_are_equal_or_multiples(total, num_ranks, expected):
    assert lengths(split_size("rows", total, num_ranks)) == expected


@given(num_kv_heads=st.integers(1, 16), num_readers=st.integers(1, 12), num_ranks=st.integers(1, 64))
def test_every_query_head_has_one_rank_which_has_its_kv_head(num_kv_heads, num_readers, num_ranks):
    num_query_heads = num_kv_heads * num_readers
    if -(-num_ranks // num_kv_heads) > num_readers:
        words = f"num_attention_heads {num_query_heads} with num_key_value_heads {num_kv_heads}"
        with pytest.raises(StartupError, match=words):
            split_heads(num_query_heads, num_kv_heads, num_ranks)
        return
    shares = split_heads(num_query_heads, num_kv_heads, num_ranks)
    assert len(shares) == num_ranks
    assert [head for share in shares for head in share.query_heads] == list(range(num_query_heads))
    for share in shares:
        group, rest = divmod(len(share.query_heads), len(share.kv_heads))
        assert rest == 0
        # What paged_attention assumes: neighbouring query heads of equal number share a KV head.
        readers = [share.kv_heads[index // group] for index in range(len(share.query_heads))]
        assert readers == [head // num_readers for head in share.query_heads]


def test_the_embedded_model_splits_unevenly():
    assert split_heads(9, 3, 2) == [HeadShare(range(6), range(2)), HeadShare(range(6, 9), range(2, 3))]


def test_ranks_beyond_the_kv_heads_share_them():
    assert split_heads(9, 3, 4) == [
        HeadShare(range(2), range(1)),
        HeadShare(range(2, 3), range(1)),
        HeadShare(range(3, 6), range(1, 2)),
        HeadShare(range(6, 9), range(2, 3)),
    ]


def test_too_many_ranks_are_refused_with_the_numbers():
    with pytest.raises(StartupError) as caught:
        split_heads(9, 3, 10)
    assert caught.value.exit_code is ExitCode.USAGE
    assert caught.value.message == (
        "--tensor-parallel-size 10: num_attention_heads 9 with num_key_value_heads 3 cannot be split over so many ranks"
    )


def test_rows_of_heads():
    assert rows_of_heads(range(2, 5), 64) == range(128, 320)


@pytest.mark.parametrize("sizes", [(9, 3, 1536, 49152), (64, 64, 8, 49152), (64, 64, 1536, 8)])
def test_a_model_that_cannot_be_split_is_known_from_its_sizes(sizes):
    check_split(*sizes, num_ranks=8)
    with pytest.raises(StartupError, match="--tensor-parallel-size 10"):
        check_split(*sizes, num_ranks=10)
