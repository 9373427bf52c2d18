"""Stop strings against a search in the whole text."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.api_server.generation.stop_strings import StopStringMatcher

letters = st.text(alphabet="ab\n😀", max_size=40)
stops = st.lists(st.text(alphabet="ab\n😀", min_size=1, max_size=5), max_size=4).map(tuple)


def search(text: str, stop: tuple[str, ...], num_chars_before: int = 0) -> tuple[str, str | None]:
    """Return (text before the stop string, the stop string): the one complete first, the longest of those.

    Stop strings that are complete within the first `num_chars_before` characters do not count.
    """
    for end in range(num_chars_before + 1, len(text) + 1):
        complete = [each for each in stop if text[:end].endswith(each)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


def run(pieces: list[str], stop: tuple[str, ...]) -> tuple[list[str], str | None]:
    matcher = StopStringMatcher(stop)
    sent = []
    for piece in pieces:
        safe, matched = matcher.push(piece)
        sent.append(safe)
        if matched is not None:
            assert matcher.flush() == ""
            return sent, matched
    return [*sent, matcher.flush()], None


@given(text=letters, stop=stops, sizes=st.lists(st.integers(0, 4)))
@example(text="abab", stop=("abb", "ba"), sizes=[1, 1, 1])
@settings(deadline=None)
def test_any_split_finds_what_a_search_finds(text: str, stop: tuple[str, ...], sizes: list[int]) -> None:
    sent, matched = run(cut(text, sizes), stop)
    assert ("".join(sent), matched) == search(text, stop)


@given(text=letters, stop=stops, sizes=st.lists(st.integers(0, 4)), can_stop=st.booleans())
@settings(deadline=None)
def test_what_is_sent_never_ends_in_the_beginning_of_a_stop_string(
    text: str, stop: tuple[str, ...], sizes: list[int], can_stop: bool
) -> None:
    matcher = StopStringMatcher(stop)
    sent = seen = ""
    for piece in cut(text, sizes):
        safe, matched = matcher.push(piece, can_stop)
        sent, seen = sent + safe, seen + piece
        if matched is not None:
            return
        held = seen[len(sent) :]
        assert seen.startswith(sent)
        begun = [each[:length] for each in stop for length in range(1, len(each)) if seen.endswith(each[:length])]
        assert held == max(begun, key=len, default="")  # no letter leaks, and none is held for nothing


@given(text=letters, stop=stops, num_chars_before=st.integers(0, 40), sizes=st.lists(st.integers(0, 4)))
@settings(deadline=None)
def test_stop_strings_complete_too_early_do_not_count(
    text: str, stop: tuple[str, ...], num_chars_before: int, sizes: list[int]
) -> None:
    matcher = StopStringMatcher(stop)
    early, late = text[:num_chars_before], text[num_chars_before:]
    sent = ""
    for piece in cut(early, sizes):
        safe, matched = matcher.push(piece, can_stop=False)
        assert matched is None
        sent += safe
    safe, matched = matcher.push(late)
    sent += safe + matcher.flush()
    expected, expected_match = search(text, stop, len(early))
    if expected_match is None:
        assert (sent, matched) == (text, None)
    else:
        assert matched == expected_match
        # What was sent while stop strings did not count stays sent; nothing of the one that counts was.
        assert sent == expected


def test_the_one_complete_first_wins_and_the_longest_of_those() -> None:
    assert run(["abcd"], ("bc", "abcd")) == (["a"], "bc")
    assert run(["xabc"], ("bc", "abc", "c")) == (["x"], "abc")


def test_a_partly_matched_stop_string_is_released_when_it_fails() -> None:
    matcher = StopStringMatcher(("<end>",))
    assert matcher.push("a<e") == ("a", None)
    assert matcher.push("n") == ("", None)
    assert matcher.push("x<") == ("<enx", None)
    assert matcher.flush() == "<"
    assert matcher.flush() == ""


def test_no_stop_strings_hold_nothing() -> None:
    for stop in ((), ("",), ("", "xy")):
        matcher = StopStringMatcher(stop)
        assert matcher.push("any x thing") == ("any x thing", None)
        assert matcher.flush() == ""
