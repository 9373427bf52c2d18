"""Text that a parser reads on its way to the client: thoughts and calls beside content, stop strings in it alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import tiny_tokenizers
from fake_engine import logprob_rows
from hypothesis import given
from hypothesis import strategies as st

from octavo.api_server.generation.job import Ending, OutputEvent, Rendering
from octavo.api_server.generation.output_processor import OutputProcessor
from octavo.api_server.generation.parsing import Reading
from octavo.api_server.parsers.base import Content, Event, MarkerScanner, Reasoning, ToolCall
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.engine_messages import FinishReason
from octavo.protocol.logprobs import TokenLogprobs
from octavo.protocol.sampling_params import SamplingParams

EOS = 1
TEXT = "<why?>so<call>be.cause"


class ToyParser:
    """Between < and > stands a thought, or, where that is `call`, a call."""

    def __init__(self) -> None:
        self._marker, self._inside = MarkerScanner("<", ">"), ""
        self._is_inside = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            before, marker, text = self._marker.push(text)
            events += self._read(before)
            if marker == ">" and self._inside == "call":
                events.append(ToolCall("call", "{}"))
            elif marker == ">":
                events.append(Reasoning(self._inside))
            self._is_inside = marker == "<" if marker else self._is_inside
            self._inside = "" if marker else self._inside
        return events

    def finish(self, is_cut: bool) -> list[Event]:
        return [] if is_cut or not self._is_inside else [Content(f"<{self._inside}")]

    def _read(self, text: str) -> list[Event]:
        if self._is_inside:
            self._inside += text
            return []
        return [Content(text)] if text else []


@functools.cache
def tokenizer() -> Tokenizer:
    return tiny_tokenizers.wrap(tiny_tokenizers.byte_level())


def ids_of(text: str) -> list[int]:
    return [token_id for character in text for token_id in tokenizer().encode(character, add_special_tokens=False)]


def processor(*stop: str, is_parallel: bool = True, **rendering: Any) -> OutputProcessor:
    params = SamplingParams(1000, num_logprobs=rendering.get("num_logprobs", -1))
    return OutputProcessor(
        tokenizer(), [], stop, params, Rendering(**rendering), reading=Reading(ToyParser, is_parallel)
    )


def run(
    target: OutputProcessor, text: str, sizes: Sequence[int], reason: FinishReason = FinishReason.STOP
) -> list[OutputEvent]:
    """Feed `text` in pieces of so many tokens, then the end."""
    token_ids, events = ids_of(text), []
    tokens = iter(token_ids)
    for size in [*sizes, len(token_ids)]:
        piece = [token_id for _, token_id in zip(range(size), tokens, strict=False)]
        events += target.process(piece, None, None, rows_of(piece))
    last = [EOS] if reason is FinishReason.STOP else []
    return events + target.process(last, reason, EOS if last else None, rows_of(last))


def rows_of(token_ids: list[int]) -> list[TokenLogprobs]:
    return [logprob_rows(token_ids, 0, 0)]


def joined(events: list[OutputEvent]) -> tuple[str, str, tuple[ToolCall, ...], Ending | None]:
    return (
        "".join(event.content for event in events),
        "".join(event.reasoning for event in events),
        tuple(call for event in events for call in event.tool_calls),
        events[-1].ending,
    )


@given(st.lists(st.integers(1, 4), max_size=22))
def test_thoughts_and_calls_are_told_from_content(sizes: list[int]) -> None:
    events = run(processor(), TEXT, sizes)
    assert joined(events) == ("sobe.cause", "why?", (ToolCall("call", "{}"),), Ending("tool_calls"))
    kinds = [[bool(event.content), bool(event.reasoning), bool(event.tool_calls)] for event in events]
    assert all(sum(kind) <= 1 for kind in kinds)
    places = [kinds.index(kind) for kind in ([False, True, False], [True, False, False], [False, False, True])]
    assert places == sorted(places), "events are not in the order of the text"


@given(st.lists(st.integers(1, 4), max_size=22))
def test_stop_strings_look_at_content_only(sizes: list[int]) -> None:
    target = processor("?", "call", "ob", ".")
    assert joined(run(target, TEXT, sizes)) == ("s", "why?", (ToolCall("call", "{}"),), Ending("stop", "ob"))
    assert target.is_finished
    target = processor("?", "call", ".")
    assert joined(run(target, TEXT, sizes))[::3] == ("sobe", Ending("stop", "."))


@pytest.mark.parametrize(
    ("reason", "content", "ending"),
    [(FinishReason.LENGTH, "a", Ending("length")), (FinishReason.STOP, "a<half", Ending("stop"))],
)
def test_what_the_parser_holds_at_the_end_is_its_to_give(reason: FinishReason, content: str, ending: Ending) -> None:
    assert joined(run(processor(), "a<half", [2], reason)) == (content, "", (), ending)


def test_a_call_does_not_hide_that_the_length_ended_the_output() -> None:
    assert joined(run(processor(), TEXT, [5], FinishReason.LENGTH))[3] == Ending("length")


@given(st.lists(st.integers(1, 4), max_size=22))
def test_the_first_call_ends_a_choice_that_is_to_have_one(sizes: list[int]) -> None:
    target = processor(is_parallel=False)
    events = run(target, "a<call>b<call>c", sizes)
    assert joined(events) == ("a", "", (ToolCall("call", "{}"),), Ending("tool_calls"))
    assert target.num_output_tokens == len("a<call>"), "tokens after the end were counted"


def test_what_the_parser_gives_at_the_end_may_complete_a_stop_string() -> None:
    assert joined(run(processor("<h"), "a<half", [2])) == ("a", "", (), Ending("stop", "<h"))


@given(st.lists(st.integers(1, 4), max_size=22))
def test_all_tokens_with_text_have_logprobs_markup_too(sizes: list[int]) -> None:
    events = run(processor(num_logprobs=0, returns_token_ids=True), TEXT, sizes)
    assert b"".join(entry.own.text for event in events for entry in event.logprobs).decode() == TEXT
    assert [token_id for event in events for token_id in event.token_ids] == [*ids_of(TEXT), EOS]


def kind_of(event: OutputEvent) -> str:
    return next(name for name in ("reasoning", "content", "tool_calls") if getattr(event, name))


@given(st.lists(st.integers(1, 4), max_size=22))
def test_entries_go_with_what_their_tokens_came_to(sizes: list[int]) -> None:
    events = [event for event in run(processor(num_logprobs=0), TEXT, sizes) if event.has_output]
    texts = [
        (kind, b"".join(entry.own.text for event in group for entry in event.logprobs))
        for kind, group in itertools.groupby(events, kind_of)
    ]
    expected = [("reasoning", b"<why?>"), ("content", b"so"), ("tool_calls", b"<call>"), ("content", b"be.cause")]
    assert texts == expected


def test_tokens_of_thoughts_are_counted() -> None:
    target = processor()
    run(target, "ab<xy>c<call>", [])
    assert target.num_output_tokens == len("ab<xy>c<call>") + 1
    assert 1 <= target.num_reasoning_tokens <= len("<xy>")
