"""Examples of each format, at every split: what is reasoning, what is content, what is a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from parser_checks import calls_of, content_of, make_spec, parse, parse_all_ways, reasoning_of

from octavo.api_server.parsers.base import Content, Reasoning, ToolCall
from octavo.api_server.parsers.selection import make_parser

TRICKY = 'a "b" \\ {[( </tool_call> <think> [TOOL_CALLS] é 😀\n\t'


class Example(NamedTuple):
    """An output, and what it is."""

    name: str
    family: str
    text: str
    calls: list[tuple[str, Any]]
    content: str = ""
    reasoning: str = ""
    starts_in_reasoning: bool = False


def paris(family: str) -> str:
    """The call get_weather(city="Paris", days=3) in a family's format."""
    return {
        "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        "qwen_xml": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "llama_json": '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        "pythonic": "[get_weather(city='Paris', days=3)]",
        "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}',
    }[family]


PARIS = ("get_weather", {"city": "Paris", "days": 3})
TIME = ("get_time", {})
FAMILIES = ("hermes", "qwen_xml", "llama_json", "pythonic", "mistral")
MARKED = ("hermes", "qwen_xml", "mistral")
THINKING = ("hermes", "qwen_xml", "mistral", "think")

EXAMPLES = [
    *(Example("one call", family, paris(family), [PARIS]) for family in FAMILIES),
    *(Example("text before", family, f"Let me see.\n\n{paris(family)}", [PARIS], "Let me see.") for family in MARKED),
    *(Example("text after", family, f"{paris(family)}\nThere.", [PARIS], "There.") for family in MARKED),
    *(Example("text around", family, f"a{paris(family)}b", [PARIS], "ab") for family in MARKED),
    *(
        Example("no call", family, "Hello, [you] {there} <b> \n", [], "Hello, [you] {there} <b> \n")
        for family in FAMILIES
    ),
    *(Example("thought", family, "\n<think>\nHm. \n\n</think>\n\nHi!\n", [], "Hi!\n", "Hm.") for family in THINKING),
    *(
        Example("open thought", family, "Hm.\n</think>\n\nHi!", [], "Hi!", "Hm.", starts_in_reasoning=True)
        for family in ("hermes", "qwen_xml", "think")
    ),
    *(
        Example("thought then call", family, f"<think>Hm.</think>\n{paris(family)}", [PARIS], "", "Hm.")
        for family in MARKED
    ),
    *(
        Example("think in the answer", family, "The <think> tag </think>.", [], "The <think> tag </think>.")
        for family in THINKING
    ),
    Example(
        "several",
        "hermes",
        f'{paris("hermes")}\n<tool_call>{{"name":"get_time","arguments":{{}}}}</tool_call>\n{paris("hermes")}',
        [PARIS, TIME, PARIS],
    ),
    Example("no closing marker", "hermes", paris("hermes").removesuffix("</tool_call>"), [PARIS]),
    Example("no closing marker between", "hermes", '<tool_call>{"name": "get_time"}' + paris("hermes"), [TIME, PARIS]),
    Example("arguments as text", "hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [("f", {})]),
    Example("no arguments", "hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", {})]),
    Example("marker in a thought", "hermes", "<think>a <tool_call> b</think>c", [], "c", "a <tool_call> b"),
    Example(
        "several",
        "qwen_xml",
        f"{paris('qwen_xml')}\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n",
        [PARIS, TIME],
    ),
    Example(
        "one line",
        "qwen_xml",
        "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
        [("f", {"a": "1"})],
    ),
    Example("no tool_call", "qwen_xml", paris("qwen_xml").removeprefix("<tool_call>\n"), [PARIS]),
    Example("no end of tool_call", "qwen_xml", paris("qwen_xml").removesuffix("\n</tool_call>"), [PARIS]),
    Example("no end of function", "qwen_xml", paris("qwen_xml").replace("\n</function>", ""), [PARIS]),
    Example("no end of parameters", "qwen_xml", paris("qwen_xml").replace("\n</parameter>", ""), [PARIS]),
    Example("call in a thought", "qwen_xml", f"<think>Hm. {paris('qwen_xml')}\n</think>\nc", [PARIS], "c", "Hm."),
    Example("no call in a thought", "qwen_xml", "<think>a <tool_call> b</think>c", [], "c", "a <tool_call> b"),
    Example(
        "tags in a value",
        "qwen_xml",
        "<function=write_file>\n<parameter=text>\n"
        "</parameter> x </function>\n<parameter=x>\n </tool_call>\n\n</parameter></function>",
        [("write_file", {"text": "</parameter> x </function>\n<parameter=x>\n </tool_call>\n"})],
    ),
    Example(
        "empty values",
        "qwen_xml",
        "<function=f>\n<parameter=a>\n</parameter>\n<parameter=b></parameter></function>",
        [("f", {"a": "", "b": ""})],
    ),
    Example("arguments", "llama_json", paris("llama_json").replace("parameters", "arguments"), [PARIS]),
    Example(
        "several", "llama_json", f'{paris("llama_json")}; {{"name": "get_time", "parameters": {{}}}}\n', [PARIS, TIME]
    ),
    Example("tag", "llama_json", f"Hm. <|python_tag|>{paris('llama_json')}", [PARIS], "Hm."),
    Example("other JSON", "llama_json", ' {"capital": "Paris"}', [], ' {"capital": "Paris"}'),
    Example("unknown tool", "llama_json", '{"name": "f", "parameters": {}}', [], '{"name": "f", "parameters": {}}'),
    Example("text behind", "llama_json", f"{paris('llama_json')} is a call", [], f"{paris('llama_json')} is a call"),
    Example("code", "llama_json", "<|python_tag|>print(1)", [], "<|python_tag|>print(1)"),
    Example("several", "pythonic", "[get_time(), get_weather(city='Paris', days=3,)]", [TIME, PARIS]),
    Example("markers", "pythonic", f"<|python_start|>{paris('pythonic')}<|python_end|>", [PARIS]),
    Example("other list", "pythonic", "[1, 2] is a list", [], "[1, 2] is a list"),
    Example("unknown tool", "pythonic", "[get_time(), f()]", [], "[get_time(), f()]"),
    Example("text behind", "pythonic", "[get_time()] is a call", [], "[get_time()] is a call"),
    Example("positional", "pythonic", "[get_weather('Paris')]", [], "[get_weather('Paris')]"),
    Example(
        "brackets in strings",
        "pythonic",
        r"""[get_weather(city=')]\'\\"', options={"a": [']']})]""",
        [("get_weather", {"city": ")]'\\\"", "options": {"a": ["]"]}})],
    ),
    Example("several", "mistral", f"{paris('mistral')}[TOOL_CALLS]get_time[ARGS]{{}}", [PARIS, TIME]),
    Example("call ids", "mistral", "[TOOL_CALLS]get_time[CALL_ID]123456789[ARGS]{}", [TIME]),
    Example("no marker of arguments", "mistral", paris("mistral").replace("[ARGS]", ""), [PARIS]),
    Example("nothing for arguments", "mistral", "[TOOL_CALLS]get_time[ARGS][TOOL_CALLS]get_time[ARGS]", [TIME, TIME]),
    Example(
        "list",
        "mistral",
        '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}, {"arguments": {"a": "]"}, "name": "f"}]',
        [TIME, ("f", {"a": "]"})],
    ),
    Example("object", "mistral", '[TOOL_CALLS] {"name": "get_time", "arguments": {}}', [TIME]),
    Example("own marker", "mistral", f"[THINK]a {paris('mistral')}[/THINK]b", [], "b", f"a {paris('mistral')}"),
    Example("open thought", "mistral", "a[/THINK]b", [], "b", "a", starts_in_reasoning=True),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.family}-{example.name}")
def test_example(example: Example) -> None:
    spec = make_spec(example.family, starts_in_reasoning=example.starts_in_reasoning)
    events = parse_all_ways(spec, example.text)
    assert calls_of(events) == example.calls
    assert content_of(events) == example.content
    assert reasoning_of(events) == example.reasoning


def quoted(family: str, text: str) -> str:
    """The call write_file(path=text, text=text) in a family's format."""
    json_text = f'"{text_in_json(text)}"'
    arguments = f'{{"path": {json_text}, "text": {json_text}}}'
    parameters = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name in ("path", "text"))
    return {
        "hermes": f'<tool_call>{{"name": "write_file", "arguments": {arguments}}}</tool_call>',
        "qwen_xml": f"<function=write_file>\n{parameters}</function>",
        "llama_json": f'{{"name": "write_file", "parameters": {arguments}}}',
        "pythonic": f"[write_file(path={json_text}, text={text!r})]",
        "mistral": f"[TOOL_CALLS]write_file[ARGS]{arguments}",
    }[family]


def text_in_json(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")


@pytest.mark.parametrize("family", FAMILIES)
def test_strings_keep_what_looks_like_the_format(family: str) -> None:
    events = parse_all_ways(make_spec(family), quoted(family, TRICKY))
    assert calls_of(events) == [("write_file", {"path": TRICKY, "text": TRICKY})]


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_are_as_the_model_wrote_them(family: str) -> None:
    if family in ("hermes", "llama_json", "mistral"):
        text = paris(family).replace('{"city": "Paris", "days": 3}', '{ "b":1.50,"a" : 1e2 }')
        (event,) = parse(make_spec(family), [text])
        assert event == ToolCall("get_weather", '{ "b":1.50,"a" : 1e2 }')


@pytest.mark.parametrize("family", FAMILIES)
def test_without_tools_nothing_is_a_call(family: str) -> None:
    text = f"{paris(family)} <|python_tag|>"
    assert parse_all_ways(make_spec(family, tools=()), text) == [Content(text)]


@pytest.mark.parametrize("family", THINKING)
def test_without_reasoning_a_thought_is_content(family: str) -> None:
    text = "<think>a</think> b"
    assert parse_all_ways(make_spec(family, has_reasoning=False), text) == [Content(text)]
    assert parse_all_ways(make_spec(family, has_reasoning=False, starts_in_reasoning=True), text) == [Content(text)]


def test_a_thought_that_the_prompt_opened_may_open_again() -> None:
    for family in ("hermes", "qwen_xml", "think", "mistral"):
        spec = make_spec(family, starts_in_reasoning=True, ends_generation_prompt="<think>\n")
        assert parse_all_ways(spec, "<think>a</think>b") == [Reasoning("a"), Content("b")]
        assert parse_all_ways(spec, "a</think>b") == [Reasoning("a"), Content("b")]


@pytest.mark.parametrize("family", FAMILIES)
def test_content_is_given_as_it_comes(family: str) -> None:
    parser = make_parser(make_spec(family))
    pieces = ["Well", ", ", "<b", "> no", "w"]
    given = [parser.push(piece) for piece in pieces]
    assert given == [[Content("Well")], [Content(",")], [Content(" <b")], [Content("> no")], [Content("w")]]


@pytest.mark.parametrize(
    ("family", "beginning"),
    [
        ("hermes", "<tool_call>x"),
        ("qwen_xml", "<tool_call>x"),
        ("qwen_xml", "<function=x> y"),
        ("llama_json", '{"capital"'),
        ("llama_json", "{}"),
        ("pythonic", "[1"),
        ("pythonic", "[get_a"),
        ("pythonic", "<|python_start|>get_time("),
        ("mistral", "[TOOL_CALLS] a b"),
    ],
)
def test_what_cannot_become_a_call_is_let_go_at_once(family: str, beginning: str) -> None:
    assert make_parser(make_spec(family)).push(beginning) == [Content(beginning)]
