"""Packed logprobs: rows out as they went in, joined and cut."""

from __future__ import annotations

import struct

import msgspec
import pytest

from octavo.protocol.logprobs import NO_ENTRY, PromptLogprobs, TokenLogprobs


def packed(rows: list[list[tuple[int, float]]], num_listed: int) -> TokenLogprobs:
    entries = [entry for row in rows for entry in row]
    token_ids = struct.pack(f"<{len(entries)}i", *(token_id for token_id, _ in entries))
    logprobs = struct.pack(f"<{len(entries)}f", *(logprob for _, logprob in entries))
    return TokenLogprobs(num_listed, token_ids, logprobs)


ROWS = [[(5, -0.5), (7, -0.25), (5, -0.5)], [(1, -8.0), (2, -0.125), (NO_ENTRY, float("-inf"))], [(3, 0.0)] * 3]


def test_rows_come_out_as_they_went_in() -> None:
    logprobs = packed(ROWS, 2)
    assert logprobs.num_rows == 3
    assert [list(zip(*row, strict=True)) for row in logprobs.rows()] == ROWS


def test_rows_without_alternatives() -> None:
    logprobs = packed([[(5, -0.5)], [(6, -1.5)]], 0)
    assert list(logprobs.rows()) == [([5], [-0.5]), ([6], [-1.5])]


def test_parts_join_to_the_whole_and_a_tail_is_what_is_left() -> None:
    for cut in range(4):
        first, second = packed(ROWS[:cut], 2), packed(ROWS[cut:], 2)
        assert first.joined(second) == packed(ROWS, 2)
        assert packed(ROWS, 2).tail(cut) == second
    with pytest.raises(ValueError, match="rows of 1"):
        packed(ROWS, 2).joined(packed([[(1, 0.0), (1, 0.0)]], 1))


def test_over_the_wire() -> None:
    sent = PromptLogprobs(4, packed(ROWS, 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=PromptLogprobs) == sent
