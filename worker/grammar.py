"""How far a request has come in its grammar, and which tokens may follow.

Nothing else in the worker knows llguidance. Where a grammar leaves one text to go on with, llguidance lets only the
first token of its usual spelling follow, although others would begin it too. So what is said is a function of the
grammar wherever the model has no choice, and models are not led to spell a key in a way that they have never seen.

Invariant: a request that could follow its grammar alone can do so whoever else follows the same text. Copies of a
compiled grammar share the states of its lexer, which are limited in number, so where a copy fails, a matcher that is
compiled for the request alone has the last word. Errors stay with their request: a matcher that fails, or panics, is a
problem of one row. Rejected: compiling for each request (a large schema takes as long as many steps, and n choices have
the same one), and loading the tokenizer at the start (50 MB, and a time that one notices, for something that many
servers are never asked for).
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octavo.protocol.grammar_limits import LLGUIDANCE_LIMITS
from octavo.worker.token_masks import pack_bits

if TYPE_CHECKING:  # the import takes as long as a step: who follows no grammar never waits for it
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_NUM_COMPILED = 32


class Grammars:
    """The grammars of one model, compiled when they are needed; the latest few are kept.

    Attributes:
        vocab_size: width of the logits.
        eos_token_ids: what may stand at the end of a grammar, and nowhere else.
    """

    def __init__(self, tokenizer_path: Path | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_path` is that of a tokenizer.json, which is read when the first grammar comes; None: all fail."""
        self.vocab_size = vocab_size
        self.eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._tokenizer_path = tokenizer_path
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @cached_property
    def free_bits(self) -> np.ndarray:
        """What may stand before a grammar begins, int32 [ceil(vocab_size / 32)]: all but the end."""
        return pack_bits(np.delete(np.arange(self.vocab_size), self.eos_token_ids), self.vocab_size)

    def copy(self, text: str) -> LLMatcher:
        """Return a matcher at the beginning of a grammar; see `compile`."""
        compiled = self._compiled.pop(text, None) or self.compile(text)
        self._compiled[text] = compiled
        if len(self._compiled) > MAX_NUM_COMPILED:
            self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def forget(self, text: str) -> None:
        """Compile the grammar anew the next time."""
        self._compiled.pop(text, None)

    def compile(self, text: str) -> LLMatcher:
        """Return a matcher that shares nothing; with an error for a bad grammar.

        Raises OSError or ValueError when there is no tokenizer that llguidance knows.
        """
        from llguidance import LLMatcher, LLParserLimits

        self._tokenizer = self._tokenizer or self._load_tokenizer()
        return LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(**LLGUIDANCE_LIMITS))

    def _load_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._tokenizer_path is None:
            raise ValueError("there is no tokenizer to follow grammars with")
        content = json.loads(self._tokenizer_path.read_text()) | {"truncation": None, "padding": None}
        return LLTokenizer(json.dumps(content), n_vocab=self.vocab_size, eos_token=self.eos_token_ids or None)


NO_GRAMMARS = Grammars(None, 0, ())


class GrammarState:
    """One request in its grammar.

    Attributes:
        num_tokens: output tokens that it was told of.
        problem: why nothing may follow any more, without a word of the request's; "" while all is well.
        failed_at: how many tokens it had been told of then; -1 while all is well.
    """

    def __init__(self, grammars: Grammars, text: str, start_token_ids: Sequence[int] = ()) -> None:
        """The grammar begins behind the first of `start_token_ids` in the output; at once when there are none."""
        self.num_tokens = 0
        self.problem = ""
        self.failed_at = -1
        self._grammars = grammars
        self._text = text
        self._start_token_ids = frozenset(start_token_ids)
        self._has_begun = not start_token_ids
        self._has_ended = False
        self._token_ids: list[int] = []  # from where the grammar began to the end, an EOS
        self._num_consumed = 0
        self._matcher: LLMatcher | None = None
        self._is_alone = False

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take the next output tokens."""
        self.num_tokens += len(token_ids)
        for token_id in token_ids:
            if self._has_begun and not self._has_ended:
                self._token_ids.append(token_id)
                self._has_ended = token_id in self._grammars.eos_token_ids
            self._has_begun = self._has_begun or token_id in self._start_token_ids

    def fill(self, bits: np.ndarray) -> None:
        """Set the bits of the tokens that may follow, int32 [ceil(vocab_size / 32)]; of none where it failed."""
        problem = self.problem or self._try_to_fill(bits)
        if problem and not self._is_alone:
            self._is_alone, self._matcher, self._num_consumed = True, None, 0
            self._grammars.forget(self._text)
            problem = self._try_to_fill(bits)
        if problem:
            bits[:] = 0
        if problem and not self.problem:
            self.problem, self.failed_at = problem, self.num_tokens
            logger.info("a request cannot follow its grammar: %s", problem)

    def _try_to_fill(self, bits: np.ndarray) -> str:
        """Return why it did not work, "" if it did."""
        try:
            return self._fill(bits)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as problem:  # noqa: BLE001 - llguidance's panics are no Exceptions, but one row's too
            return type(problem).__name__

    def _fill(self, bits: np.ndarray) -> str:
        if not self._has_begun:
            bits[:] = self._grammars.free_bits
            return ""
        from llguidance.numpy import fill_next_token_bitmask

        if self._matcher is None:
            self._matcher = (self._grammars.compile if self._is_alone else self._grammars.copy)(self._text)
        matcher = self._matcher
        if not matcher.consume_tokens(self._token_ids[self._num_consumed :]):
            return matcher.stop_reason()
        self._num_consumed = len(self._token_ids)
        fill_next_token_bitmask(matcher, bits[None])
        return matcher.stop_reason() if matcher.is_error() else ""
