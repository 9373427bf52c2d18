"""What a model says can make no terminal do anything."""

from __future__ import annotations

import unicodedata

import pytest

from octavo.api_server.client.terminal_text import BIDI_CONTROLS, safe


def test_only_line_feeds_and_tabs_are_left_of_all_control_characters() -> None:
    controls = "".join(chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) == "Cc")
    assert len(controls) == 65
    left = [char for char in safe(controls) if unicodedata.category(char) == "Cc"]
    assert left == ["\t", "\n"]
    assert len(safe(controls)) == len(controls)


@pytest.mark.parametrize(
    "text",
    ["\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "a\rb", "\x08\x08", "\x1b]52;c;aGk=\x1b\\", *map(chr, BIDI_CONTROLS)],
)
def test_a_sequence_is_shown_and_not_obeyed(text: str) -> None:
    assert not set(safe(text)) & {"\x1b", "\x9b", "\x07", "\r", "\x08", *map(chr, BIDI_CONTROLS)}
    assert "".join(map(safe, text)) == safe(text), "however it is cut"


def test_text_stays_as_it_is() -> None:
    text = "Zürich\t東京 👩‍👧\n```py\nx = '\\x1b'\n```"
    assert safe(text) == text
