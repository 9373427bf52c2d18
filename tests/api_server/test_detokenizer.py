"""Streamed text against the tokenizer's own decoding of the whole."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from octavo.api_server.generation.detokenizer import Detokenizer
from octavo.api_server.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_TINY_ID = 360  # above every tiny vocabulary: ids that no token has
texts = st.text(alphabet="abHello wrd.,\n\t😀👩‍👧é日ß\u2581\ufffd<>", max_size=20)
garbage = st.lists(st.sampled_from(range(MAX_TINY_ID + 1)), max_size=30)
PLAIN_KINDS = ("byte_level", "unigram", "word_piece", "end_of_word_bpe")  # no token is a raw byte beside whole text
BYTE_TOKEN_KINDS = ("byte_fallback_bpe", "byte_fallback_no_strip")


@functools.cache
def tiny(kind: str) -> Tokenizer:
    return tiny_tokenizers.wrap(tiny_tokenizers.KINDS[kind]())


def stream(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip_special_tokens: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens)
    return "".join(map(detokenizer.append, output)) + detokenizer.finish()


def added_text(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip_special_tokens: bool) -> str:
    """Return what the tokenizer's decoder makes of the output after the prompt."""
    before = tokenizer.decode(prompt, skip_special_tokens)
    after = tokenizer.decode(prompt + output, skip_special_tokens)
    assert after.startswith(before)
    return after[len(before) :]


def byte_token_text(tokenizer: Tokenizer, output: list[int]) -> str:
    """Return the text of a tokenizer with byte tokens by the definition: bytes joined, then read as UTF-8."""
    raw = tokenizer.token_bytes._tokenizer  # type: ignore[attr-defined]
    tokens = [raw.id_to_token(each) for each in output if each not in tokenizer.special_token_ids]
    parts = (
        bytes.fromhex(token[3:5]) if len(token) == 6 and token.startswith("<0x") else token.replace("▁", " ").encode()
        for token in tokens
        if token is not None
    )
    return b"".join(parts).decode(errors="replace")


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@given(prompt=garbage, output=garbage, text=texts, skip_special_tokens=st.booleans())
@settings(max_examples=150, deadline=None)
def test_joined_pieces_are_what_the_tokenizer_decodes(
    kind: str, prompt: list[int], output: list[int], text: str, skip_special_tokens: bool
) -> None:
    tokenizer = tiny(kind)
    output = output + tokenizer.encode(text, add_special_tokens=False)
    if kind == "byte_level":
        assert stream(tokenizer, prompt, output, skip_special_tokens) == tokenizer.decode(output, skip_special_tokens)
    else:
        expected = added_text(tokenizer, prompt, output, skip_special_tokens)
        assert stream(tokenizer, prompt, output, skip_special_tokens) == expected


@pytest.mark.parametrize("kind", BYTE_TOKEN_KINDS)
@given(output=garbage)
@settings(max_examples=150, deadline=None)
def test_byte_tokens_make_the_characters_that_their_bytes_make(kind: str, output: list[int]) -> None:
    tokenizer = tiny(kind)
    prompt = tokenizer.encode("Hello")
    assert stream(tokenizer, prompt, output) == byte_token_text(tokenizer, output)


@pytest.mark.parametrize("kind", BYTE_TOKEN_KINDS)
@given(prompt=texts, text=texts)
@settings(max_examples=150, deadline=None)
def test_text_with_byte_tokens_equals_the_full_decode(kind: str, prompt: str, text: str) -> None:
    tokenizer = tiny(kind)
    prompt_ids, output = tokenizer.encode(prompt), tokenizer.encode(text)
    assert stream(tokenizer, prompt_ids, output) == added_text(tokenizer, prompt_ids, output, True)


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
@given(output=garbage, text=texts)
@settings(max_examples=60, deadline=None)
def test_b13_garbage_tokens_always_give_valid_utf8(kind: str, output: list[int], text: str) -> None:
    tokenizer = tiny(kind)
    output = output + tokenizer.encode(text) + output
    stream(tokenizer, [], output).encode()  # a lone surrogate raises


@pytest.mark.parametrize("kind", ["byte_level", *BYTE_TOKEN_KINDS])
@pytest.mark.parametrize("text", ["😀", "日本語", "👩‍👩‍👧", "x😀é"])
def test_b11_no_piece_shows_half_a_character(kind: str, text: str) -> None:
    tokenizer = tiny(kind)
    prompt, output = tokenizer.encode("Hello"), tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, prompt)
    pieces = [detokenizer.append(each) for each in output] + [detokenizer.finish()]
    assert "" in pieces[:-1]  # a character did come in parts
    assert REPLACEMENT not in "".join(pieces)
    assert "".join(pieces).strip() == text


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return the tokens that stand for single bytes."""
    found = {tokenizer.token_bytes.get(each, each): each for each in reversed(range(tokenizer.vocab_size))}
    return [found[bytes([value])] for value in data]


@pytest.mark.parametrize("kind", ["byte_level", *BYTE_TOKEN_KINDS])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_b11_a_cut_inside_a_character_is_one_replacement_character(kind: str, num_bytes: int) -> None:
    tokenizer = tiny(kind)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("Hello"))
    assert [detokenizer.append(each) for each in byte_ids(tokenizer, "😀".encode()[:num_bytes])] == [""] * num_bytes
    assert detokenizer.finish() == REPLACEMENT
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", ["byte_level", *BYTE_TOKEN_KINDS])
@pytest.mark.parametrize("byte", [0x80, 0xC3, 0xE2, 0xF0, 0xFF])
def test_invalid_bytes_are_not_held_back(kind: str, byte: int) -> None:
    tokenizer = tiny(kind)
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.append(each) for each in byte_ids(tokenizer, bytes([byte]) * 1000)]
    assert len("".join(pieces)) >= 999
    assert all(len(piece) <= 1 for piece in pieces)


def test_the_space_before_the_first_word_stays_after_a_prompt() -> None:
    tokenizer = tiny("byte_fallback_bpe")
    hello = tokenizer.encode("Hello")
    assert stream(tokenizer, hello, hello) == " Hello"
    assert stream(tokenizer, [], hello) == "Hello"
    begin_of_text = [tokenizer.bos_token_id or 0]
    assert stream(tokenizer, begin_of_text, hello) == "Hello"  # special tokens are not text
    assert stream(tokenizer, begin_of_text, hello, skip_special_tokens=False) == " Hello"
    assert stream(tokenizer, [MAX_TINY_ID], hello) == "Hello"  # nor are ids without a token


def test_special_tokens_are_skipped_unless_asked_for() -> None:
    tokenizer = tiny("byte_level")
    output = tokenizer.encode("Hello<|turn|> world<tool><終>")
    assert stream(tokenizer, [], output) == "Hello world<tool><終>"
    assert stream(tokenizer, [], output, skip_special_tokens=False) == "Hello<|turn|> world<tool><終>"


def test_text_that_was_given_is_final_even_when_a_decoder_would_change_it() -> None:
    raw = tiny_tokenizers.byte_fallback_bpe()
    space = raw.token_to_id(tiny_tokenizers.SPACE_MARK)
    replace = decoders.Replace(tiny_tokenizers.SPACE_MARK, " ")
    raw.decoder = decoders.Sequence([replace, decoders.Fuse(), decoders.Replace("  ", "-")])
    assert raw.decode([space, space]) == "-"
    assert stream(tiny_tokenizers.wrap(raw), [], [space, space]) == "  "


@pytest.mark.model
@given(output=st.lists(st.integers(0, 50_000), max_size=60), text=st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_smollm2_streams_what_it_decodes(smollm2_directory: Path, output: list[int], text: str) -> None:
    tokenizer = smollm2_tokenizer(smollm2_directory)
    output = output + tokenizer.encode(text) + output
    assert stream(tokenizer, tokenizer.encode("Hello"), output) == tokenizer.decode(output)


@functools.cache
def smollm2_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(str(directory))
