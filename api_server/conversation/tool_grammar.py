"""Grammars of forced calls: what a model writes when it must call one of some tools, and nothing else.

The text is Lark as llguidance reads it. Around each tool's schema stands what the family's parser expects to find. A
family that has no form here is forced into Hermes' form, and its answer is read by Hermes' parser (`form_family`).
Nothing here looks into a schema: whether it is one that a grammar can be made of is checked with the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from octavo.api_server.conversation.tools import Tool

FALLBACK = "hermes"
OUR_OPTIONS = "x-guidance"  # the key under which a schema holds options of the grammar; never a client's
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class CallForm(NamedTuple):
    """How a family writes calls as JSON objects. Every part is a series of texts, so that markers stand alone.

    Attributes:
        first, last: what stands around all calls.
        begin, end: what stands around each call.
        between: what stands between two calls.
        arguments_key: what the object calls the arguments.
    """

    first: tuple[str, ...] = ()
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    between: tuple[str, ...] = ("\n",)
    last: tuple[str, ...] = ()
    arguments_key: str = "arguments"


FORMS = {
    "hermes": CallForm(begin=("<tool_call>", "\n"), end=("\n", "</tool_call>")),
    "llama_json": CallForm(between=("; ",), arguments_key="parameters"),
    "mistral": CallForm(first=("[TOOL_CALLS]", "["), between=(", ",), last=("]",)),
}


def form_family(family: str) -> str:
    """Return the family in whose form calls are forced, and whose parser has to read the answer."""
    return family if family in FORMS else FALLBACK


def grammar_of(family: str, tools: Sequence[Tool], is_parallel: bool, special_token_ids: Mapping[str, int]) -> str:
    """Return the grammar of an answer that is one call of one of `tools`, or several calls.

    Args:
        family: one that `form_family` returned.
        tools: those that may be called, not empty.
        is_parallel: there may be several calls.
        special_token_ids: text to id of the tokenizer's special tokens, which a grammar can only name by id.
    """
    form = FORMS[family]

    def spell(*texts: str) -> str:
        return " ".join(
            f"<[{special_token_ids[text]}]>" if text in special_token_ids else _quote(text) for text in texts
        )

    kinds = " | ".join(f"call_{index}" for index in range(len(tools)))
    more = f"({spell(*form.between)} call)*" if is_parallel else ""
    rules = [
        " ".join(filter(None, ("start:", spell(*form.first), "call", more, spell(*form.last)))),
        " ".join(filter(None, ("call:", spell(*form.begin), f"({kinds})", spell(*form.end)))),
    ]
    for index, tool in enumerate(tools):
        head = f'{{"name": {_quote(tool.name)}, {_quote(form.arguments_key)}: '
        rules.append(f"call_{index}: {_quote(head)} arguments_{index} {_quote('}')}")
        rules.append(f"arguments_{index}: %json {_schema_text(tool)}")
    return "\n".join(rules)


def _quote(text: str) -> str:
    """Return a text as both JSON and Lark write it."""
    return json.dumps(text, ensure_ascii=False)


def _schema_text(tool: Tool) -> str:
    """Return the schema of a tool's arguments with our options in it instead of the client's."""
    schema: dict[str, Any] = {"type": "object", **tool.parameters}
    if not tool.parameters:
        schema["additionalProperties"] = False
    schema[OUR_OPTIONS] = {**SPACING, "lenient": not tool.function.strict}
    return json.dumps(schema, ensure_ascii=False)
