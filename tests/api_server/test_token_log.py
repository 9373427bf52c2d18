"""Which logprob entries belong to which text: offsets in characters, bytes, and when an entry may go out."""

from __future__ import annotations

import functools
import math

import pytest
import tiny_tokenizers
from fake_engine import logprob_rows
from hypothesis import given
from hypothesis import strategies as st

from octavo.api_server.generation.detokenizer import Detokenizer
from octavo.api_server.generation.job import TokenEntry
from octavo.api_server.generation.token_log import MIN_LOGPROB, TokenLog, prompt_entries, prompt_text
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.logprobs import NO_ENTRY, TokenLogprobs

EOS = 1


@functools.cache
def tokenizer() -> Tokenizer:
    return tiny_tokenizers.wrap(tiny_tokenizers.byte_level())


def id_of_byte(byte: int) -> int:
    """Return the token that is this byte alone."""
    return next(token_id for token_id in range(345) if tokenizer().token_bytes.get(token_id, None) == bytes([byte]))


def ids_of(data: bytes) -> list[int]:
    return [id_of_byte(byte) for byte in data]


def entries_of(token_ids: list[int], logs_silent_tokens: bool = False, first_offset: int = 0) -> list[TokenEntry]:
    log = TokenLog(Detokenizer(tokenizer(), []), logs_silent_tokens, first_offset)
    log.feed([logprob_rows(token_ids, 0, 0)])
    for token_id in token_ids:
        log.append(token_id)
    return list(log.take_all())


@pytest.mark.parametrize(
    ("data", "offsets"),
    [
        (b"ab", [0, 1]),
        ("aé".encode(), [0, 1, 1]),
        ("😀b".encode(), [0, 0, 0, 0, 1]),
        (b"\xe2\x82a", [0, 0, 1]),  # the half character is one U+FFFD
        (b"\xe2\x82\xc3\xa9", [0, 0, 1, 1]),
        (b"\xffa", [0, 1]),
        (b"\xe2a\xe2b", [0, 1, 2, 3]),
    ],
)
def test_a_token_begins_in_the_character_of_its_first_byte(data: bytes, offsets: list[int]) -> None:
    found = entries_of(ids_of(data))
    assert [entry.offset for entry in found] == offsets
    assert b"".join(entry.own.text for entry in found) == data
    assert [entry.offset for entry in entries_of(ids_of(data), first_offset=5)] == [5 + each for each in offsets]


@given(
    st.lists(
        st.sampled_from([b"a", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"\xff"]), min_size=1
    )
)
def test_an_offset_is_that_of_a_mark_put_before_the_token(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    whole = data.decode(errors="replace")
    for place, entry in enumerate(entries_of(ids_of(data))):
        marked = (data[:place] + b"|" + data[place:]).decode(errors="replace")
        if marked.replace("|", "") == whole:  # the mark cuts no character
            assert entry.offset == marked.index("|")
        else:
            assert entry.offset == marked.index("|") - 1


def test_entries_wait_for_their_text() -> None:
    token_ids = ids_of("aé b".encode())
    log = TokenLog(Detokenizer(tokenizer(), []), logs_silent_tokens=False)
    log.feed([logprob_rows(token_ids[:3], 0, 0), logprob_rows(token_ids[3:], 3, 0)])
    assert [log.append(token_id) for token_id in token_ids] == ["a", "", "é", " ", "b"]
    assert log.take(0) == ()
    assert [entry.own.text for entry in log.take(1)] == [b"a"]
    assert [entry.own.text for entry in log.take(3)] == [b"\xc3", b"\xa9", b" "]
    assert [entry.own.text for entry in log.take_all()] == [b"b"]


def test_tokens_without_text_have_entries_only_when_asked_for() -> None:
    token_ids = [*ids_of(b"a"), EOS, *ids_of(b"b")]
    assert [entry.own.token_id for entry in entries_of(token_ids)] == [token_ids[0], token_ids[2]]
    logged = entries_of(token_ids, logs_silent_tokens=True)
    assert [entry.offset for entry in logged] == [0, 1, 1]
    assert logged[1].own.text == tokenizer().token_bytes.get(EOS, None)


def test_alternatives_that_do_not_exist_are_left_out_and_infinity_has_a_number() -> None:
    token_id = ids_of(b"a")[0]
    rows = TokenLogprobs(
        2,
        b"".join(each.to_bytes(4, "little", signed=True) for each in (token_id, token_id, NO_ENTRY)),
        bytes.fromhex("000080ff" * 3),
    )
    log = TokenLog(Detokenizer(tokenizer(), []), logs_silent_tokens=False)
    log.feed([rows])
    log.append(token_id)
    (entry,) = log.take_all()
    assert [score.token_id for score in entry.likeliest] == [token_id]
    assert entry.own.logprob == MIN_LOGPROB
    assert math.isfinite(MIN_LOGPROB)


def test_a_prompt_has_an_entry_for_every_token() -> None:
    prompt = [EOS, *ids_of("é!".encode()), EOS]
    rows = [logprob_rows(prompt[1:2], 1, 1), logprob_rows(prompt[2:], 2, 1)]
    found = prompt_entries(tokenizer(), prompt, rows, skip_special_tokens=True)
    assert [entry.own.token_id for entry in found] == prompt
    assert found[0].own.logprob is None
    assert [entry.offset for entry in found] == [0, 0, 0, 1, 2]
    assert found[0].likeliest == ()
    assert [len(entry.likeliest) for entry in found[1:]] == [1] * 4
    assert prompt_text(tokenizer(), prompt, skip_special_tokens=True) == "é!"
    assert prompt_text(tokenizer(), ids_of(b"x\xe2"), skip_special_tokens=True) == "x\ufffd"
