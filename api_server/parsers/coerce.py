"""Arguments that a format writes without their type, to the type that the tool's schema gives them.

Where the schema allows several types, the text is taken for the first of these that it can be: null, boolean, integer,
number, object, array, string. It is read as strict JSON, or as Python's spelling of a constant, a list or a dict. Text
that can be nothing that the schema allows stays a string, so that the client sees what the model wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.api_server.parsers.json_scan import decode_strict, encode
from octavo.api_server.parsers.python_literals import read_literal

MAX_SCHEMA_STEPS = 64
CONSTANTS = {
    "null": ("null", "null"),
    "None": ("null", "null"),
    "true": ("boolean", "true"),
    "True": ("boolean", "true"),
    "false": ("boolean", "false"),
    "False": ("boolean", "false"),
}
ANYTHING = frozenset({"object", "array", "string"})  # of a schema that says no type: numbers stay as they are written


def coerce(text: str, schema: Any, root: Mapping[str, Any] | None = None) -> str:
    """Return the JSON text of an argument.

    Args:
        text: the argument as the model wrote it.
        schema: JSON schema of the argument; None when the tool has no argument of that name, which makes it a string.
        root: schema of all arguments, in which `$ref` looks.
    """
    types = frozenset({"string"}) if schema is None else _types(schema, root or {})
    stripped = text.strip()
    kind, constant = CONSTANTS.get(stripped, ("", ""))
    if kind in types:
        return constant
    if types & {"integer", "number"} and _is_number(stripped, "number" in types):
        return stripped
    for kind, opener, python_type in (("object", "{", dict), ("array", "[", list)):
        if kind in types and stripped.startswith(opener):
            return _structure(stripped, python_type) or encode(text)
    return encode(text)


def arguments_of(texts: Mapping[str, str], schema: dict[str, Any] | None) -> str:
    """Return the JSON text of all arguments, in their order.

    Args:
        texts: name of each argument to what the model wrote.
        schema: JSON schema of the tool's arguments; None for a tool that is not offered, whose arguments are strings.
    """
    root = schema or {}
    properties = root.get("properties")
    known = properties if isinstance(properties, dict) else {}
    members = (f"{encode(name)}: {coerce(text, known.get(name), root)}" for name, text in texts.items())
    return "{" + ", ".join(members) + "}"


def _is_number(text: str, may_have_fraction: bool) -> bool:
    try:
        value = decode_strict(text)
    except ValueError:
        return False
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return may_have_fraction or isinstance(value, int) or value.is_integer()


def _structure(text: str, python_type: type) -> str | None:
    """Return the JSON text of an object or array; None if the text is none."""
    try:
        return text if isinstance(decode_strict(text), python_type) else None
    except ValueError:
        pass
    try:
        value = read_literal(text)
        return encode(value) if isinstance(value, python_type) else None
    except ValueError:
        return None


def _types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the types that a schema allows; `ANYTHING` if it does not say."""
    types: set[str] = set()
    waiting = [schema]
    for _ in range(MAX_SCHEMA_STEPS):
        if not waiting:
            break
        part = waiting.pop()
        if isinstance(part, dict):
            types.update(_own_types(part))
            waiting.extend(_parts(part, root))
    return frozenset(types) or ANYTHING


def _own_types(schema: dict[str, Any]) -> Iterator[str]:
    named = schema.get("type")
    if isinstance(named, str):
        yield named
    elif isinstance(named, list):
        yield from (each for each in named if isinstance(each, str))
    elif "const" in schema:
        yield _type_of(schema["const"])
    elif isinstance(schema.get("enum"), list):
        yield from map(_type_of, schema["enum"])
    elif "properties" in schema:
        yield "object"
    elif "items" in schema:
        yield "array"
    if schema.get("nullable") is True:
        yield "null"


def _parts(schema: dict[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(keyword), list):
            yield from schema[keyword]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for name in reference[2:].split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        yield target


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    return names[type(value)]
