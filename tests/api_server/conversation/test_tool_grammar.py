"""Grammars of forced calls: their text, and what parsers make of answers in their form."""

from __future__ import annotations

import json

import pytest
from parser_checks import TOOLS, calls_of, make_spec, parse

from octavo.api_server.conversation.tool_grammar import FORMS, form_family, grammar_of
from octavo.api_server.conversation.tools import FunctionSpec, Tool
from octavo.api_server.parsers.selection import FAMILIES


def spell(family: str, *names: str) -> str:
    """An answer in a family's form that calls tools without arguments."""
    form = FORMS[family]
    calls = [f'{{"name": "{name}", "{form.arguments_key}": {{}}}}' for name in names]
    body = "".join(form.between).join("".join((*form.begin, call, *form.end)) for call in calls)
    return "".join((*form.first, body, *form.last))


@pytest.mark.parametrize("family", FORMS)
def test_the_family_s_parser_reads_its_form(family: str) -> None:
    for names in (["get_time"], ["get_time", "get_weather", "get_time"]):
        assert calls_of(parse(make_spec(family), [spell(family, *names)])) == [(name, {}) for name in names]


def test_every_family_has_a_form() -> None:
    assert {form_family(family) for family in FAMILIES} == set(FORMS)
    assert form_family("hermes") == "hermes"
    assert form_family("glm") == "hermes"


def test_one_call_of_one_tool() -> None:
    rules = grammar_of("hermes", TOOLS[1:2], is_parallel=False, special_token_ids={}).split("\n")
    assert rules[:3] == [
        "start: call",
        'call: "<tool_call>" "\\n" (call_0) "\\n" "</tool_call>"',
        r'call_0: "{\"name\": \"get_time\", \"arguments\": " arguments_0 "}"',
    ]
    schema = json.loads(rules[3].removeprefix("arguments_0: %json "))
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
    assert schema == {"type": "object", "additionalProperties": False, "x-guidance": options}


def test_several_calls_of_several_tools() -> None:
    rules = grammar_of("mistral", TOOLS, is_parallel=True, special_token_ids={"[TOOL_CALLS]": 5}).split("\n")
    assert rules[:2] == ['start: <[5]> "[" call (", " call)* "]"', "call: (call_0 | call_1 | call_2 | call_3)"]
    assert len(rules) == 2 + 2 * len(TOOLS)


def test_a_schema_cannot_set_options_of_the_grammar() -> None:
    parameters = {"properties": {"a": {"type": "string"}}, "x-guidance": {"lenient": True, "whitespace_flexible": True}}
    tool = Tool(function=FunctionSpec(name="f", parameters=parameters, strict=True))
    schema = json.loads(grammar_of("llama_json", [tool], False, {}).split("%json ")[1])
    assert schema["x-guidance"]["lenient"] is False
    assert schema["x-guidance"]["whitespace_flexible"] is False
    assert schema["properties"] == parameters["properties"]
    assert schema["type"] == "object"


def test_a_schema_cannot_leave_its_line() -> None:
    tool = Tool(function=FunctionSpec(name="f", parameters={"description": 'a\nstart: "b"\n'}))
    assert len(grammar_of("hermes", [tool], False, {}).split("\n")) == 4
