"""Which format a model has: what its template writes, and what the operator says."""

from __future__ import annotations

import pytest

from octavo.api_server.parsers.base import Content, ParserSpec
from octavo.api_server.parsers.selection import FAMILIES, MARKERS, Selection, make_parser, select, starts_in_reasoning
from octavo.protocol.config import ParserName

TEMPLATES = {  # pieces of templates as their models have them
    "hermes": '{{- \'<tool_call>\\n{"name": "\' }}{{ tool_call.name }} <think>',
    "qwen_xml": "{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}<parameter=",
    "glm": "<tool_call>{{ tc.name }}\n{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>",
    "mistral": '{{- "[TOOL_CALLS][" }}[THINK]',
    "llama_json": "{{- '<|python_tag|>' + tool_call.name + '.call(' }}",
    "pythonic": "{{- '<|python_start|>' }} {{ '<|python_tag|>' }}",
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}<think>",
    "deepseek_dsml": "<｜DSML｜invoke name=",
    "kimi": "<|tool_calls_section_begin|>",
    "kimi_k3": "<|open|>",
    "harmony": "<|start|>assistant<|channel|>analysis",
    "gemma": "<|tool_call>call:",
    "think": "{{ content.split('</think>') }}<think>",
}
CHATML = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']}}{% endfor %}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_shows_its_family(family: str) -> None:
    has_reasoning = family not in ("llama_json", "pythonic")
    assert select(TEMPLATES[family]) == Selection(family, family != "think", has_reasoning)


def test_a_template_may_show_nothing() -> None:
    assert select(CHATML) == Selection("", has_calls=False, has_reasoning=False)


@pytest.mark.parametrize(
    ("calls", "thoughts", "selection"),
    [
        ("glm", "auto", Selection("glm", True, True)),
        ("none", "auto", Selection("hermes", False, True)),
        ("auto", "none", Selection("hermes", True, False)),
        ("none", "none", Selection("", False, False)),
        ("none", "mistral", Selection("mistral", False, True)),
        ("auto", "think", Selection("hermes", True, True)),
        ("qwen_xml", "hermes", Selection("qwen_xml", True, True)),
        ("pythonic", "none", Selection("pythonic", True, False)),
        ("pythonic", "auto", Selection("pythonic", True, False)),
    ],
)
def test_flags_come_first(calls: str, thoughts: str, selection: Selection) -> None:
    assert select(TEMPLATES["hermes"], calls, thoughts) == selection


def test_a_template_with_thoughts_only_and_a_flag_for_calls() -> None:
    assert select(TEMPLATES["think"], "hermes") == Selection("hermes", True, True)


@pytest.mark.parametrize(
    ("calls", "thoughts", "flag"),
    [
        ("hermes2", "auto", "--tool-call-parser hermes2"),
        ("auto", "deep", "--reasoning-parser deep"),
        ("hermes", "mistral", "--reasoning-parser mistral"),
        ("harmony", "think", "--reasoning-parser think"),
        ("llama_json", "think", "--reasoning-parser think"),
    ],
)
def test_flags_that_cannot_be(calls: str, thoughts: str, flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        select("", calls, thoughts)


def test_the_names_that_flags_take_are_those_of_the_parsers() -> None:
    assert {*ParserName} == {ParserName.AUTO, ParserName.NONE, *FAMILIES}


def test_every_marker_has_a_family() -> None:
    assert {family for _, family in MARKERS} == FAMILIES.keys()


@pytest.mark.parametrize(
    ("family", "prompt", "starts"),
    [
        ("hermes", "<|im_start|>assistant\n<think>\n", True),
        ("hermes", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("hermes", "<|im_start|>assistant\n", False),
        ("mistral", "[/INST][THINK]", True),
        ("mistral", "[/INST]", False),
        ("gemma", "<|turn>model\n<|channel>thought\n", True),
        ("gemma", "<think>", False),
    ],
)
def test_a_prompt_may_open_a_thought(family: str, prompt: str, starts: bool) -> None:
    assert starts_in_reasoning(family, prompt) is starts


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_plain_text_on(family: str) -> None:
    parser = make_parser(ParserSpec(family))
    events = [event for piece in ("Hel", "lo.") for event in parser.push(piece)]
    assert [*events, *parser.finish(is_cut=False)] == [Content("Hel"), Content("lo.")]
