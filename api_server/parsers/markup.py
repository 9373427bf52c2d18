"""Attributes of markup that models write, `name="x" string="true"`, and arguments whose text is in such markup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.api_server.parsers.base import BLANKS
from octavo.api_server.parsers.coerce import arguments_of
from octavo.api_server.parsers.json_scan import decode_strict, encode

# In this order: what an ampersand stood for must not be read again.
ENTITIES = (("&quot;", '"'), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"))


def attributes(text: str) -> dict[str, str] | None:
    """Return the attributes in `text`, values between double quotes; None if anything else is there, or one twice."""
    found: dict[str, str] = {}
    text, position = text.rstrip(BLANKS), 0
    while position < len(text):
        opening = text.find('="', position)
        closing = text.find('"', opening + 2)
        name = text[position:opening].lstrip(BLANKS)
        if opening < 0 or closing < 0 or not name or name in found:
            return None
        found[name] = text[opening + 2 : closing]
        position = closing + 1
    return found


def without_entities(text: str) -> str:
    """Return `text` with its four entities replaced by what they stand for."""
    for entity, character in ENTITIES:
        text = text.replace(entity, character)
    return text


def member(name: str, text: str, is_string: bool | None, schema: dict[str, Any] | None) -> str:
    """Return the JSON text of an argument, name included.

    Args:
        text: the argument as the model wrote it, not escaped.
        is_string: what the model says that it is: text, or else JSON; None when it does not say.
        schema: JSON schema of the tool's arguments, which decides where the model does not, or is wrong.
    """
    if is_string:
        return f"{encode(name)}: {encode(text)}"
    if is_string is False and _is_json(text):
        return f"{encode(name)}: {text.strip(BLANKS)}"
    return arguments_of({name: text}, schema)[1:-1]


def object_of(members: Iterable[str]) -> str:
    """Return the JSON text of the object that has these members."""
    return "{" + ", ".join(members) + "}"


def _is_json(text: str) -> bool:
    try:
        decode_strict(text)
    except ValueError:
        return False
    return True
