"""The tools that parsers are made of, against plain searches in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.api_server.parsers.base import Content, MarkerScanner, Reasoning, ToolCall, TrimmedText, join_events

MARKERS = ("<a>", "</a>", "<|b", "[ab]")
pieces = st.lists(st.text(alphabet="<a>/|b[] ", max_size=6), max_size=6)


def search(text: str) -> list[tuple[str, str]]:
    """Text before each marker with that marker, the earliest first, and the rest of the text with ""."""
    found = []
    while positions := [(text.find(marker), marker) for marker in MARKERS if marker in text]:
        position, marker = min(positions)
        found.append((text[:position], marker))
        text = text[position + len(marker) :]
    return [*found, (text, "")]


@given(pieces)
@example(["<", "<a", ">", "<a"])
def test_markers_are_found_in_any_pieces(pieces: list[str]) -> None:
    scanner = MarkerScanner(*MARKERS)
    found, before = [], ""
    for piece in pieces:
        rest = piece
        while True:
            scan = scanner.push(rest)
            before += scan.before
            if not scan.marker:
                break
            found.append((before, scan.marker))
            before, rest = "", scan.rest
    assert [*found, (before + scanner.finish(), "")] == search("".join(pieces))


@given(pieces)
def test_only_the_beginning_of_a_marker_is_held_back(pieces: list[str]) -> None:
    scanner = MarkerScanner(*MARKERS)
    for piece in pieces:
        scan = scanner.push(piece)
        while scan.marker:
            scan = scanner.push(scan.rest)
    held = scanner.finish()
    assert not held or any(marker.startswith(held) and marker != held for marker in MARKERS)
    assert scanner.finish() == ""


@pytest.mark.parametrize("markers", [("",), ("<a>", "<a"), ("x", "axb")])
def test_no_marker_is_part_of_another(markers: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="part of another"):
        MarkerScanner(*markers)


def trim(*parts: str | None, is_sealed: bool = False) -> str:
    """Push the texts, with an edge where None stands; whole and character by character give the same."""
    results = set()
    for cut in (lambda text: [text], list):
        trimmed = TrimmedText(is_sealed)
        result = []
        for part in parts:
            if part is None:
                trimmed.seal()
            else:
                result += map(trimmed.push, cut(part))
        results.add("".join(result) + trimmed.finish())
    (result,) = results
    return result


def test_white_space_at_edges() -> None:
    assert trim(" a \n") == " a \n"
    assert trim(" \n") == " \n"
    assert trim("\n", None, "\n a ") == "a "
    assert trim("a\n", None) == "a"
    assert trim("a\n", None, " \n", None, "\n") == "a"
    assert trim("a\n", None, "\n\n", None, " b") == "a\n b"
    assert trim("a", None, None, "\n\nb") == "a\n\nb"
    assert trim("a ", None, "\n", None, " ", "b") == "a  b"
    assert trim("a", None, "b") == "ab"
    assert trim("\n a b \n", is_sealed=True) == "a b \n"


def test_events_are_joined() -> None:
    call = ToolCall("f", "{}")
    events = [Content("a"), Content(""), Reasoning(""), Content("b"), call, call, Content(""), Reasoning("c")]
    assert join_events(events) == [Content("ab"), call, call, Reasoning("c")]
    assert join_events([]) == []
