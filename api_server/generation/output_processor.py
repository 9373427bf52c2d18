"""Output tokens of one choice to events: detokenize, parse, look for stop strings, say how and where it ended.

Text goes through in this order: tokens, detokenizer, parser (where there is one), stop strings, event. Stop strings
look at content only, so they cut neither thoughts nor calls.

Invariants: the events joined are the same however the tokens were split into calls; the token that ended the request
(EOS or a stop token) gives no text but counts; nothing after a stop string is counted or shown.

`min_tokens`: a stop string counts only if it is completed by the text of output token number `min_tokens` or a later
one; it may begin before. Text belongs to the token that completes its character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.api_server.generation.detokenizer import Detokenizer
from octavo.api_server.generation.job import Ending, OutputEvent, Rendering, TokenEntry
from octavo.api_server.generation.parsing import Reading
from octavo.api_server.generation.stop_strings import StopStringMatcher
from octavo.api_server.generation.token_log import TokenLog
from octavo.api_server.parsers.base import Content, Event, Reasoning
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.engine_messages import FinishReason
from octavo.protocol.logprobs import TokenLogprobs
from octavo.protocol.sampling_params import NO_LOGPROBS, SamplingParams

TOOL_CALLS = "tool_calls"
PLAIN = Rendering()


class OutputProcessor:
    """State of one choice.

    Attributes:
        num_output_tokens: tokens that count so far.
        num_reasoning_tokens: those of them after which the text is a thought; 0 without a parser.
        is_finished: the choice has ended. When a stop string ended it, the engine does not know yet: abort there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: tuple[str, ...],
        sampling_params: SamplingParams,
        rendering: Rendering = PLAIN,
        index: int = 0,
        reading: Reading | None = None,
        num_echoed_characters: int = 0,
    ) -> None:
        self.index = index
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0
        self.is_finished = False
        self._rendering = rendering
        self._sampling_params = sampling_params
        skipped_ids = None if reading is None else reading.skipped_ids
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, rendering.skip_special_tokens, skipped_ids)
        self._detokenize = self._detokenizer.append
        self._log: TokenLog | None = None
        if rendering.num_logprobs != NO_LOGPROBS:
            self._log = TokenLog(self._detokenizer, rendering.logs_silent_tokens, num_echoed_characters)
            self._detokenize = self._log.append
        self._has_extras = self._log is not None or rendering.returns_token_ids
        self._num_reported_tokens = 0
        self._parser = None if reading is None else reading.new_parser()
        self._is_parallel = reading is None or reading.is_parallel
        self._matcher = StopStringMatcher(stop)
        self._num_shown_characters = 0
        self._is_thinking = False
        self._has_called = False
        self._contents: list[str] = []  # of this call of `process`, behind the events of it
        self._content_entries: list[TokenEntry] = []  # of those, where a parser reads
        self._events: list[OutputEvent] = []

    def process(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        stop_token_id: int | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> list[OutputEvent]:
        """Take the next output tokens. With FinishReason.STOP the last of them is what ended the request.

        `logprobs` have a row for each of them when the request asks for logprobs.
        """
        if self.is_finished:
            return []
        ending = self._read(token_ids, finish_reason, stop_token_id, logprobs)
        self.is_finished = ending is not None
        extras = self._extras(token_ids, ending) if self._has_extras else {}
        last = OutputEvent(self.index, "".join(self._contents), ending=ending, **extras)
        events, self._events, self._contents = self._events, [], []
        if ending is not None or last.has_output:
            events.append(last)
        return events

    def _extras(self, token_ids: Sequence[int], ending: Ending | None) -> dict[str, Any]:
        """Return what goes beside the text of the last event of a call."""
        num_new = self.num_output_tokens - self._num_reported_tokens
        self._num_reported_tokens = self.num_output_tokens
        new_ids = tuple(token_ids[:num_new]) if self._rendering.returns_token_ids else ()
        return {"token_ids": new_ids, "logprobs": self._take_entries(ending)}

    def _read(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        stop_token_id: int | None,
        logprobs: Sequence[TokenLogprobs],
    ) -> Ending | None:
        """Read tokens up to the end of the choice, which is returned if it is there."""
        if self._log is not None:
            self._log.feed(logprobs)
        num_silent = 1 if finish_reason is FinishReason.STOP and token_ids else 0
        for token_id in token_ids[: len(token_ids) - num_silent]:
            self.num_output_tokens += 1
            ending = self._push(self._detokenize(token_id))
            self.num_reasoning_tokens += self._is_thinking
            if ending is not None:
                return ending
        if finish_reason is None:
            return None
        self.num_output_tokens += num_silent
        if num_silent and self._log is not None:
            self._log.append_silent()
        return self._end(finish_reason, stop_token_id)

    def _end(self, finish_reason: FinishReason, stop_token_id: int | None) -> Ending:
        """The engine ended the request: let go of all that is held; its last bytes may complete a stop string."""
        ending = self._push(self._detokenizer.finish())
        if ending is None and self._parser is not None:
            ending = self._push_parsed(self._parser.finish(is_cut=finish_reason is FinishReason.LENGTH))
        if ending is not None:
            return ending
        self._show(self._matcher.flush())
        stop_reason = stop_token_id if stop_token_id in self._sampling_params.stop_token_ids else None
        is_calling = self._has_called and finish_reason is FinishReason.STOP
        return Ending(TOOL_CALLS if is_calling else finish_reason.value, stop_reason)

    def _push(self, text: str) -> Ending | None:
        """Take more text; return the ending if the choice ends with it, by a stop string or by its one call."""
        return self._push_content(text) if self._parser is None else self._push_parsed(self._parser.push(text))

    def _push_parsed(self, events: list[Event]) -> Ending | None:
        for event in events:
            self._is_thinking = isinstance(event, Reasoning)
            if isinstance(event, Content):
                ending = self._push_content(event.text)
                if ending is not None:
                    return ending
                continue
            self._close_content()
            entries = () if self._log is None else self._log.take_all()
            if isinstance(event, Reasoning):
                self._events.append(OutputEvent(self.index, reasoning=event.text, logprobs=entries))
            else:
                self._has_called = True
                self._events.append(OutputEvent(self.index, tool_calls=(event,), logprobs=entries))
                if not self._is_parallel:
                    return Ending(TOOL_CALLS)
        return None

    def _push_content(self, text: str) -> Ending | None:
        can_stop = self.num_output_tokens >= self._sampling_params.min_tokens
        safe_text, stop = self._matcher.push(text, can_stop)
        if stop is not None and self._rendering.include_stop_string:
            safe_text += stop
        self._show(safe_text)
        return None if stop is None else Ending(FinishReason.STOP.value, stop)

    def _show(self, text: str) -> None:
        self._contents.append(text)
        self._num_shown_characters += len(text)
        if text and self._log is not None and self._parser is not None:
            self._content_entries += self._log.take_all()

    def _close_content(self) -> None:
        """Make an event of the content so far, because something of another kind follows."""
        if content := "".join(self._contents):
            self._events.append(OutputEvent(self.index, content, logprobs=tuple(self._content_entries)))
        self._contents, self._content_entries = [], []

    def _take_entries(self, ending: Ending | None) -> tuple[TokenEntry, ...]:
        """Return the entries that go with the content so far: those whose text was shown, at the end perhaps more.

        How much a parser holds back is not known; there a text has the entries that are new when it comes.
        """
        if self._log is None:
            return ()
        if self._parser is not None:
            entries, self._content_entries = self._content_entries, []
            return (*entries, *(() if ending is None else self._log.take_all()))
        is_cut = ending is None or isinstance(ending.stop_reason, str)
        return self._log.take(self._num_shown_characters) if is_cut else self._log.take_all()


class DroppedOutput:
    """State of a choice whose output is not wanted: the one token of a request for nothing but its prompt."""

    num_output_tokens = 0
    num_reasoning_tokens = 0

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_finished = False

    def process(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        stop_token_id: int | None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> list[OutputEvent]:
        """Take and drop output; at its end, the choice is what its maximum of no tokens made it."""
        if self.is_finished or finish_reason is None:
            return []
        self.is_finished = True
        return [OutputEvent(self.index, ending=Ending(FinishReason.LENGTH.value))]
