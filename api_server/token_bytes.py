"""Which bytes of text a token stands for, so that text can be made token by token at constant cost.

Tokenizers come in two kinds. In byte-level ones (GPT-2's alphabet) a token is a piece of the byte string, whatever
stands next to it. In the others (SentencePiece, WordPiece) a token's text depends on whether something stands before
it, and `<0xE2>`-like tokens stand for single bytes. Invariant: the bytes of a token never change once given, so text
only grows. Rejected: decoding a window again and again and comparing (the `DecodeStream` of tokenizers): it holds text
back for as long as the window ends in an invalid byte, at growing cost, and raises when a decoder rewrites its past.
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(Protocol):
    """The bytes of one token."""

    def get(self, token_id: int, previous_id: int | None) -> bytes | None:
        """Return what `token_id` adds to a text whose last token is `previous_id` (None: it starts the text).

        None when the tokenizer has no such token; it adds nothing, and it is nobody's previous token.
        """


class UnsupportedDecoderError(Exception):
    """The tokenizer's decoder cannot be taken apart into tokens."""


def make_token_bytes(tokenizer: tokenizers.Tokenizer) -> TokenBytes:
    """Return the TokenBytes that fits the decoder of `tokenizer`; raises UnsupportedDecoderError."""
    kinds = _decoder_kinds(tokenizer)
    if "ByteLevel" not in kinds:
        return ContextTokenBytes(tokenizer, has_byte_tokens="ByteFallback" in kinds)
    if set(kinds) <= {"ByteLevel", "Fuse"}:
        return ByteLevelTokenBytes(tokenizer)
    raise UnsupportedDecoderError(f"its decoder chains ByteLevel with others: {', '.join(kinds)}")


def _decoder_kinds(tokenizer: tokenizers.Tokenizer) -> list[str]:
    if tokenizer.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return [each["type"] for each in decoder.get("decoders", [decoder])]


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 characters are their own byte, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteLevelTokenBytes:
    """Tokens written in the byte-level alphabet; a token with any other character is its own UTF-8."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_level_alphabet()
        self._known: dict[int, bytes] = {}  # at most one entry per token of the vocabulary

    def get(self, token_id: int, previous_id: int | None) -> bytes | None:
        known = self._known.get(token_id)
        if known is None and (token := self._tokenizer.id_to_token(token_id)) is not None:
            known = self._known[token_id] = self._to_bytes(token)
        return known

    def _to_bytes(self, token: str) -> bytes:
        try:
            return bytes([self._alphabet[character] for character in token])
        except KeyError:
            return token.encode()


class ContextTokenBytes:
    """Tokens whose text is what the tokenizer's own decoder adds for them after the token before.

    Byte tokens are an exception: they are handed out as raw bytes, because a decoder shows an incomplete character as
    U+FFFD. When a decoder would rewrite the text before, that text stays and the token gives what it gives alone.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, has_byte_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = _find_byte_tokens(tokenizer) if has_byte_tokens else {}

    def get(self, token_id: int, previous_id: int | None) -> bytes | None:
        if (raw := self._byte_tokens.get(token_id)) is not None:
            return raw
        if self._tokenizer.id_to_token(token_id) is None:
            return None
        return self._added_text(token_id, previous_id).encode()

    def _added_text(self, token_id: int, previous_id: int | None) -> str:
        if previous_id is None:
            return self._decode([token_id])
        before = self._decode([previous_id])
        after = self._decode([previous_id, token_id])
        return after[len(before) :] if after.startswith(before) else self._decode([token_id])

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _find_byte_tokens(tokenizer: tokenizers.Tokenizer) -> dict[int, bytes]:
    matches = ((token_id, BYTE_TOKEN.fullmatch(token)) for token, token_id in tokenizer.get_vocab().items())
    return {token_id: bytes.fromhex(match[1]) for token_id, match in matches if match}
