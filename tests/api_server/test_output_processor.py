"""Text deltas of one choice: stop strings, min_tokens, UTF-8, and how it ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.api_server.generation.detokenizer import Detokenizer
from octavo.api_server.generation.job import Rendering
from octavo.api_server.generation.output_processor import OutputProcessor
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.engine_messages import FinishReason
from octavo.protocol.sampling_params import SamplingParams

EOS = 1
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
MAX_ID = 345
outputs = st.lists(st.sampled_from(range(MAX_ID + 1)), min_size=1, max_size=30)
splits = st.lists(st.integers(1, 4), max_size=30)


@functools.cache
def tokenizer() -> Tokenizer:
    return tiny_tokenizers.wrap(tiny_tokenizers.byte_level())


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def characters(text: str) -> list[int]:
    """Return one token for each byte of `text`."""
    return [token_id for character in text for token_id in encode(character)]


class TextDelta(NamedTuple):
    """The events of one call, joined, and the tokens counted then."""

    text: str
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Processor:
    """An OutputProcessor whose events are joined."""

    def __init__(self, *stop: str, include_stop_string: bool = False, **params: Any) -> None:
        sampling_params = SamplingParams(**{"max_tokens": 1000, **params})
        rendering = Rendering(include_stop_string=include_stop_string)
        self.inner = OutputProcessor(tokenizer(), encode("Hello"), stop, sampling_params, rendering)

    def process(self, token_ids: Sequence[int], reason: FinishReason | None, stop_id: int | None) -> TextDelta:
        events = self.inner.process(token_ids, reason, stop_id)
        endings = [event.ending for event in events if event.ending is not None]
        assert all(event.has_output or event.ending for event in events)
        assert endings in ([], [events[-1].ending] if events else [])
        text = "".join(event.content for event in events)
        return TextDelta(text, self.inner.num_output_tokens, *(endings[0] if endings else ()))


processor = Processor


def feed(
    target: Processor,
    output: Sequence[int],
    sizes: Sequence[int],
    reason: FinishReason,
    stop_id: int | None = None,
) -> list[TextDelta]:
    """Give `output` in pieces of `sizes`, the rest in the last one, and then `reason`."""
    deltas = []
    begin = 0
    for size in sizes:
        if begin + size >= len(output):
            break
        deltas.append(target.process(output[begin : begin + size], None, None))
        begin += size
    return [*deltas, target.process(output[begin:], reason, stop_id)]


def ending(deltas: list[TextDelta]) -> tuple[str, int, FinishReason | None, str | int | None]:
    """Return (joined text, counted tokens, finish reason, stop reason) and check that it ended once."""
    finished = [each for each in deltas if each.finish_reason is not None]
    assert len(finished) == 1
    last = deltas.index(finished[0])
    assert all(each == TextDelta("", finished[0].num_output_tokens) for each in deltas[last + 1 :])
    return "".join(each.text for each in deltas), *finished[0][1:]


def plain_text(output: Sequence[int]) -> str:
    detokenizer = Detokenizer(tokenizer(), [])
    return "".join(map(detokenizer.append, output)) + detokenizer.finish()


@given(output=outputs, sizes=splits, stop=st.lists(st.sampled_from(["a", "\ufffd", "He", " w", "é"]), max_size=2))
@settings(max_examples=300, deadline=None)
def test_every_split_gives_the_same_valid_text(output: list[int], sizes: list[int], stop: list[str]) -> None:
    whole = ending([processor(*stop).process(output, LENGTH, None)])
    assert ending(feed(processor(*stop), output, sizes, LENGTH)) == whole
    whole[0].encode()
    if not stop:
        assert whole == (tokenizer().decode(output), len(output), LENGTH, None)


@given(output=outputs, sizes=splits, begin=st.integers(0, 40), size=st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_b01_text_is_cut_before_the_stop_string_and_no_letter_of_it_leaks(
    output: list[int], sizes: list[int], begin: int, size: int
) -> None:
    unstopped = plain_text(output)
    stop = unstopped[begin : begin + size]
    deltas = feed(processor(stop), output, sizes, LENGTH)
    text, num_output_tokens, reason, stop_reason = ending(deltas)
    if not stop:
        assert (text, reason, stop_reason) == (unstopped, LENGTH, None)
        return
    position = unstopped.find(stop)
    assert (text, reason, stop_reason) == (unstopped[:position], STOP, stop)
    assert stop in plain_text(output[:num_output_tokens])
    # One token less had not completed it, unless by its half character.
    assert stop not in plain_text(output[: num_output_tokens - 1]).rstrip("\ufffd")
    sent = ""
    for delta in deltas:
        sent += delta.text
        assert unstopped[:position].startswith(sent)


def test_b01_a_stop_string_may_begin_and_end_inside_tokens() -> None:
    output = encode("The quick brown")
    stop = "ick b"
    assert stop not in [tokenizer().token_text(each) for each in output]
    target = processor(stop)
    deltas = feed(target, output, [1] * 20, LENGTH)
    assert ending(deltas)[0] == "The qu"
    assert target.inner.is_finished


def test_tokens_after_the_stop_string_do_not_count() -> None:
    target = processor("lo")
    assert target.process(characters("hello world"), None, None) == TextDelta("hel", 5, STOP, "lo")
    assert target.process(characters("more"), LENGTH, None) == TextDelta("", 5)
    assert target.inner.num_output_tokens == 5


def test_the_stop_string_is_shown_when_asked_for() -> None:
    target = processor("lo", include_stop_string=True)
    assert ending(feed(target, characters("hello world"), [1] * 20, LENGTH)) == ("hello", 5, STOP, "lo")


def test_b09_stop_strings_before_min_tokens_do_not_count() -> None:
    output = characters("a;b;cc;d;")
    assert ending(feed(processor(";", min_tokens=0), output, [], LENGTH)) == ("a", 2, STOP, ";")
    assert ending(feed(processor(";", min_tokens=4), output, [], LENGTH)) == ("a;b", 4, STOP, ";")
    assert ending(feed(processor(";", min_tokens=5), output, [], LENGTH)) == ("a;b;cc", 7, STOP, ";")
    assert ending(feed(processor("b;cc", min_tokens=5), output, [], LENGTH)) == ("a;", 6, STOP, "b;cc")


@given(output=outputs, sizes=splits, min_tokens=st.integers(0, 30), begin=st.integers(0, 40), size=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_b09_min_tokens_holds_for_every_split(
    output: list[int], sizes: list[int], min_tokens: int, begin: int, size: int
) -> None:
    stop = plain_text(output)[begin : begin + size]
    whole = ending([processor(stop, min_tokens=min_tokens).process(output, LENGTH, None)])
    assert ending(feed(processor(stop, min_tokens=min_tokens), output, sizes, LENGTH)) == whole
    assert whole[1] >= min(min_tokens, len(output))


def test_b11_an_emoji_comes_whole_and_a_cut_one_is_one_replacement_character() -> None:
    emoji = characters("😀")
    assert len(emoji) > 1
    target = processor()
    assert [target.process([each], None, None).text for each in emoji] == [""] * (len(emoji) - 1) + ["😀"]
    assert target.process(emoji[:-1], LENGTH, None).text == "\ufffd"
    assert ending([processor().process(emoji + emoji[:-1], LENGTH, None)])[0] == "😀\ufffd"


def test_a_stop_string_completed_by_the_last_bytes_counts() -> None:
    output = characters("x😀")[:-1]
    assert ending(feed(processor("x\ufffd"), output, [1, 1], LENGTH)) == ("", len(output), STOP, "x\ufffd")
    too_early = processor("x\ufffd", min_tokens=len(output) + 1)
    assert ending(feed(too_early, output, [1, 1], LENGTH)) == ("x\ufffd", len(output), LENGTH, None)


def test_what_is_held_back_comes_with_the_end() -> None:
    target = processor("lo world")
    assert target.process(characters("hello "), None, None) == TextDelta("hel", 6)
    assert target.process([EOS], STOP, None) == TextDelta("lo ", 7, STOP, None)


def test_the_token_that_ends_the_request_counts_and_is_not_shown() -> None:
    tool_id = encode("<tool>")[0]  # not a special token: it would be shown
    target = processor(stop_token_ids=(tool_id,))
    assert target.process([*characters("hi"), tool_id], STOP, tool_id) == TextDelta("hi", 3, STOP, tool_id)
    assert processor().process([tool_id], LENGTH, None) == TextDelta("<tool>", 1, LENGTH, None)


def test_eos_has_no_stop_reason() -> None:
    assert processor().process([*characters("hi"), EOS], STOP, EOS) == TextDelta("hi", 3, STOP, None)


def test_an_end_without_tokens() -> None:
    assert processor().process([], FinishReason.ABORT, None) == TextDelta("", 0, FinishReason.ABORT)
    assert processor().process([], STOP, None) == TextDelta("", 0, STOP)
