"""Output tokens of one choice to text deltas: detokenize, look for stop strings, say how and where it ended.

Invariants: the deltas joined are the same however the tokens were split into calls; the token that ended the request
(EOS or a stop token) gives no text but counts; nothing after a stop string is counted or shown.

`min_tokens`: a stop string counts only if it is completed by the text of output token number `min_tokens` or a later
one; it may begin before. Text belongs to the token that completes its character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.api_server.generation.detokenizer import Detokenizer
from octavo.api_server.generation.stop_strings import StopStringMatcher
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.engine_messages import FinishReason
from octavo.protocol.sampling_params import SamplingParams


class TextDelta(NamedTuple):
    """What a client gets to see of one engine output.

    Attributes:
        text: new text, final, whole UTF-8.
        num_output_tokens: all output tokens of the choice so far, the one that ended it included.
        finish_reason: set once, in the delta that ends the choice.
        stop_reason: the stop string or the id of the client's stop token; None for EOS and other ends.
    """

    text: str
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class OutputProcessor:
    """State of one choice.

    Attributes:
        num_output_tokens: tokens that count so far.
        is_finished: the choice has ended. When a stop string ended it, the engine does not know yet: abort there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: tuple[str, ...],
        sampling_params: SamplingParams,
        skip_special_tokens: bool = True,
        include_stop_string: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
        self._matcher = StopStringMatcher(stop)
        self._sampling_params = sampling_params
        self._include_stop_string = include_stop_string
        self.num_output_tokens = 0
        self.is_finished = False

    def process(
        self, token_ids: Sequence[int], finish_reason: FinishReason | None, stop_token_id: int | None
    ) -> TextDelta:
        """Take the next output tokens. With FinishReason.STOP the last of them is what ended the request."""
        if self.is_finished:
            return TextDelta("", self.num_output_tokens)
        num_silent = 1 if finish_reason is FinishReason.STOP else 0
        texts = []
        for token_id in token_ids[: len(token_ids) - num_silent]:
            self.num_output_tokens += 1
            text, stop = self._push(self._detokenizer.append(token_id))
            texts.append(text)
            if stop is not None:
                return self._finish("".join(texts), FinishReason.STOP, stop)
        if finish_reason is None:
            return TextDelta("".join(texts), self.num_output_tokens)
        self.num_output_tokens += min(num_silent, len(token_ids))
        return self._end("".join(texts), finish_reason, stop_token_id)

    def _end(self, text: str, finish_reason: FinishReason, stop_token_id: int | None) -> TextDelta:
        """The engine ended the request: let go of all that is held; its last bytes may complete a stop string."""
        last_text, stop = self._push(self._detokenizer.finish())
        if stop is not None:
            return self._finish(text + last_text, FinishReason.STOP, stop)
        stop_reason = stop_token_id if stop_token_id in self._sampling_params.stop_token_ids else None
        return self._finish(text + last_text + self._matcher.flush(), finish_reason, stop_reason)

    def _push(self, text: str) -> tuple[str, str | None]:
        can_stop = self.num_output_tokens >= self._sampling_params.min_tokens
        safe_text, stop = self._matcher.push(text, can_stop)
        return (safe_text + stop if stop is not None and self._include_stop_string else safe_text), stop

    def _finish(self, text: str, finish_reason: FinishReason, stop_reason: str | int | None) -> TextDelta:
        self.is_finished = True
        return TextDelta(text, self.num_output_tokens, finish_reason, stop_reason)
