"""Logprobs of tokens next to their text: which entry belongs to which text, and when a client may see it.

An entry goes out with the text that has the first character of its token, so it never tells what is still held back,
for a stop string or because a character is incomplete. Where a stop string cuts the text, entries of tokens that begin
at or behind the cut are dropped; a token in which the cut falls stays. So the entries, joined, are the same however the
tokens were split into calls. An entry's bytes are exact, even where the text has U+FFFD for them.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from octavo.api_server.generation.detokenizer import Detokenizer
from octavo.api_server.generation.job import TokenEntry, TokenScore
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.logprobs import NO_ENTRY, TokenLogprobs

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have
Row = tuple[Sequence[int], Sequence[float | None]]  # the token's own entry, then the likeliest


class TokenLog:
    """The entries of one output, between its tokens and its text.

    Attributes:
        num_characters: of the output so far, those held back for a stop string included.
    """

    def __init__(self, detokenizer: Detokenizer, logs_silent_tokens: bool, first_offset: int = 0) -> None:
        """`first_offset`: characters of the answer before the output."""
        self.num_characters = 0
        self._detokenizer = detokenizer
        self._logs_silent_tokens = logs_silent_tokens
        self._first_offset = first_offset
        self._rows: Iterator[Row] = iter(())
        self._waiting: deque[TokenEntry] = deque()

    def feed(self, logprobs: Iterable[TokenLogprobs]) -> None:
        """Give the rows of the tokens that are appended next."""
        self._rows = chain.from_iterable(piece.rows() for piece in logprobs)

    def append(self, token_id: int) -> str:
        """Detokenize the next token and note its entry; return the text that is certain now."""
        return self._append(token_id, next(self._rows))

    def append_without_row(self, token_id: int) -> str:
        """Do the same for a token that has no logprob."""
        return self._append(token_id, ((token_id,), (None,)))

    def append_silent(self) -> None:
        """Note the entry of the next token, which ends the output and gives no text."""
        self._note(next(self._rows), self.num_characters, is_silent=True)

    def take(self, num_characters: int) -> tuple[TokenEntry, ...]:
        """Return the entries, not yet returned, that begin within the first `num_characters` of the output."""
        end = self._first_offset + num_characters
        taken = []
        while self._waiting and self._waiting[0].offset < end:
            taken.append(self._waiting.popleft())
        return tuple(taken)

    def take_all(self) -> tuple[TokenEntry, ...]:
        taken = tuple(self._waiting)
        self._waiting.clear()
        return taken

    def _append(self, token_id: int, row: Row) -> str:
        is_silent = self._detokenizer.is_silent(token_id)
        self._note(row, self._start_of(token_id, is_silent), is_silent)
        text = self._detokenizer.append(token_id)
        self.num_characters += len(text)
        return text

    def _note(self, row: Row, start: int, is_silent: bool) -> None:
        if self._logs_silent_tokens or not is_silent:
            (own, *likeliest) = self._scores(row)
            self._waiting.append(TokenEntry(own, tuple(likeliest), self._first_offset + start))

    def _start_of(self, token_id: int, is_silent: bool) -> int:
        """Return the number of characters before the one that `token_id` begins in."""
        incomplete = self._detokenizer.incomplete_bytes
        if not incomplete or is_silent or _goes_on(incomplete, self._detokenizer.bytes_of(token_id)):
            return self.num_characters
        return self.num_characters + 1  # the incomplete character ends as one U+FFFD

    def _scores(self, row: Row) -> list[TokenScore]:
        bytes_of = self._detokenizer.bytes_of
        return [
            TokenScore(token_id, bytes_of(token_id), None if logprob is None else max(logprob, MIN_LOGPROB))
            for token_id, logprob in zip(*row, strict=True)
            if token_id != NO_ENTRY
        ]


def prompt_text(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Return the text of a prompt, as `prompt_entries` counts its characters."""
    detokenizer = Detokenizer(tokenizer, (), skip_special_tokens)
    return "".join(map(detokenizer.append, token_ids)) + detokenizer.finish()


def prompt_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], skip_special_tokens: bool
) -> list[TokenEntry]:
    """Return an entry for every token of a prompt; `logprobs` has a row for each but the first, in several pieces."""
    log = TokenLog(Detokenizer(tokenizer, (), skip_special_tokens), logs_silent_tokens=True)
    log.append_without_row(token_ids[0])
    log.feed(logprobs)
    for token_id in token_ids[1:]:
        log.append(token_id)
    return list(log.take_all())


def _goes_on(incomplete: bytes, added: bytes) -> bool:
    """Return whether the first byte of `added` continues the character that `incomplete` begins."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(incomplete + added[:1])
    except UnicodeDecodeError:
        return False
    return True
