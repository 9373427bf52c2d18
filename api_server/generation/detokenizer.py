"""Output tokens to text, piece by piece, always whole UTF-8.

Invariant: the pieces joined are the same text however the tokens were split into calls, and each piece is final. At
most one incomplete character (3 bytes) is held back. Bytes that cannot become a character turn into U+FFFD, one for
each maximal part of a character as in the Unicode standard, section 3.9; an incomplete character at the end is one.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from octavo.api_server.tokenizer import Tokenizer


class Detokenizer:
    """The text of one output.

    For byte-level tokenizers the joined text equals `Tokenizer.decode(output_token_ids)` exactly. For others it equals
    what decoding prompt and output together adds to the decoded prompt: the space before the first word stays, since
    the output continues the prompt. One difference is meant: a run of byte tokens that is not valid UTF-8 as a whole is
    given by `decode` as one U+FFFD for every byte of the run, here its valid characters survive.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        skipped_ids: Collection[int] | None = None,
    ) -> None:
        """Begin after `prompt_token_ids`; only the last of them that has text is used.

        `skipped_ids`: which tokens count as special here; None leaves it to the tokenizer.
        """
        self._token_bytes = tokenizer.token_bytes
        special_ids = tokenizer.special_token_ids if skipped_ids is None else skipped_ids
        self._skipped_ids = special_ids if skip_special_tokens else ()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._previous_id = next((each for each in reversed(prompt_token_ids) if self._has_text(each)), None)

    def append(self, token_id: int) -> str:
        """Return the text that is certain now; empty while a character is incomplete."""
        if token_id in self._skipped_ids:
            return ""
        new_bytes = self._token_bytes.get(token_id, self._previous_id)
        if new_bytes is None:
            return ""
        self._previous_id = token_id
        return self._utf8.decode(new_bytes)

    def finish(self) -> str:
        """Return the rest: one U+FFFD when the output ends inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)

    @property
    def incomplete_bytes(self) -> bytes:
        """What is held back: the beginning of a character."""
        return self._utf8.getstate()[0]

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that `token_id` stands for here, also if its text is skipped; none if it has no text."""
        return self._token_bytes.get(token_id, self._previous_id) or b""

    def is_silent(self, token_id: int) -> bool:
        """Whether `token_id` would add no bytes here."""
        return token_id in self._skipped_ids or not self.bytes_of(token_id)

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped_ids and self._token_bytes.get(token_id, None) is not None
