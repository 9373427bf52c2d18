"""Text from elsewhere made safe to show: a terminal obeys what it prints.

Escape sequences can move the cursor, rename the window, write to the clipboard or answer in the user's stead, and
marks that turn the direction of text around show other text than there is. So every control character but the line
feed and the tab is replaced by a visible sign. One character at a time, so it does not matter how a text was cut.
"""

from __future__ import annotations

PICTURES = 0x2400  # U+2400 and on are pictures of the characters from 0 on
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BIDI_CONTROLS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
KEPT = (ord("\n"), ord("\t"))
SAFE = {
    **{code: chr(PICTURES + code) for code in range(0x20) if code not in KEPT},
    0x7F: "\N{SYMBOL FOR DELETE}",
    **dict.fromkeys((*range(0x80, 0xA0), *BIDI_CONTROLS), REPLACEMENT),
}


def safe(text: str) -> str:
    """Return `text` with nothing in it that a terminal would obey."""
    return text.translate(SAFE)
