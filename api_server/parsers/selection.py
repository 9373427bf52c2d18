"""Which format a model's output has: by the operator's flags, else by what the model's chat template writes.

A template shows the format because it has to write earlier turns of the conversation in it. Its markers are looked for
in an order in which the more particular ones come first: several formats share `<tool_call>`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from octavo.api_server.parsers import (
    deepseek,
    deepseek_dsml,
    gemma,
    glm,
    harmony,
    hermes,
    kimi,
    kimi_k3,
    llama_json,
    mistral,
    pythonic,
    qwen_xml,
    think,
)
from octavo.api_server.parsers.base import Parser, ParserSpec
from octavo.protocol.config import ParserName

FAMILIES: dict[str, Callable[[ParserSpec], Parser]] = {
    "deepseek": deepseek.make_parser,
    "deepseek_dsml": deepseek_dsml.make_parser,
    "gemma": gemma.make_parser,
    "glm": glm.make_parser,
    "harmony": harmony.make_parser,
    "hermes": hermes.make_parser,
    "kimi": kimi.make_parser,
    "kimi_k3": kimi_k3.make_parser,
    "llama_json": llama_json.make_parser,
    "mistral": mistral.make_parser,
    "pythonic": pythonic.make_parser,
    "qwen_xml": qwen_xml.make_parser,
    "think": think.make_parser,
}
AUTO, NONE = ParserName.AUTO, ParserName.NONE
FALLBACK = "hermes"  # for tools that are offered to a model whose template knows no format

MARKERS = (  # what a template writes -> family
    ("<｜DSML｜", "deepseek_dsml"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<|open|>", "kimi_k3"),
    ("<|channel|>", "harmony"),
    ("<|tool_call>", "gemma"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen_xml"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama_json"),
    ("<think>", "think"),
)

THINK_OPENERS = ("<think>",)
OPENERS = {  # markers that begin a thought, where they are others
    "gemma": ("<|channel>thought",),
    "harmony": ("<|channel|>analysis<|message|>",),
    "kimi_k3": ("<|open|>think<|sep|>",),
    "mistral": ("[THINK]", "<think>"),
}
WITHOUT_CALLS = {"think"}
WITHOUT_THOUGHTS = {"llama_json", "pythonic"}


class Selection(NamedTuple):
    """The format of a model.

    Attributes:
        family: key of `FAMILIES`, "" when nothing is known or everything is switched off.
        has_calls, has_reasoning: what of it is told from content.
    """

    family: str
    has_calls: bool
    has_reasoning: bool


def select(template: str, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> Selection:
    """Choose the format.

    Args:
        template: source of the chat template.
        tool_call_parser: `--tool-call-parser`: a family, `none`, or `auto` to look at the template.
        reasoning_parser: `--reasoning-parser`: likewise. Beside a family with calls it can be that family, or `think`
            if that family's thoughts stand between `<think>` and `</think>`.

    Raises:
        ValueError: no such family, or two that do not go together; the text names the flag.
    """
    for flag, name in (("--tool-call-parser", tool_call_parser), ("--reasoning-parser", reasoning_parser)):
        if name not in (AUTO, NONE, *FAMILIES):
            raise ValueError(f"{flag} {name} is not known; known are {', '.join((AUTO, NONE, *FAMILIES))}")
    found = next((family for marker, family in MARKERS if marker in template), "")
    calls = found if tool_call_parser == AUTO else tool_call_parser
    thoughts = reasoning_parser
    if reasoning_parser == AUTO:
        thoughts = found if calls in ("", NONE) else calls
    has_calls = calls not in ("", NONE, *WITHOUT_CALLS)
    has_reasoning = thoughts not in ("", NONE, *WITHOUT_THOUGHTS)
    if has_calls and has_reasoning and thoughts != calls and not _shares_thoughts(calls, thoughts):
        raise ValueError(f"--reasoning-parser {thoughts} does not go with --tool-call-parser {calls}")
    family = calls if has_calls else thoughts if has_reasoning else ""
    return Selection(family, has_calls, has_reasoning)


def starts_in_reasoning(family: str, prompt: str) -> bool:
    """Whether a rendered prompt ends with a marker that begins a thought, white space behind it aside."""
    return prompt.rstrip().endswith(OPENERS.get(family, THINK_OPENERS))


def make_parser(spec: ParserSpec) -> Parser:
    """Return a new parser for one choice. KeyError: `spec.family` is no key of `FAMILIES`."""
    return FAMILIES[spec.family](spec)


def _shares_thoughts(calls: str, thoughts: str) -> bool:
    return all(family not in OPENERS and family not in WITHOUT_THOUGHTS for family in (calls, thoughts))
