"""How the output of a request is read: by the format that its model writes, the tools that it offers, and its prompt.

The format is chosen once, at start. Invariant: an output is read in the format that its prompt asked for: a model whose
template explains no tools is told to write Hermes' format (`conversation.tool_prompt`), so that is what is read then,
unless the operator named another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from octavo.api_server.chat_template import ChatTemplate
from octavo.api_server.conversation.tools import ToolUse
from octavo.api_server.errors import unsupported
from octavo.api_server.parsers.base import Parser, ParserSpec
from octavo.api_server.parsers.selection import AUTO, FALLBACK, make_parser, select, starts_in_reasoning
from octavo.protocol.config import ApiConfig
from octavo.protocol.lifecycle import ExitCode, StartupError

NUM_ENDING_CHARACTERS = 64  # of a prompt, in which a parser sees what the template has begun


class Reading(msgspec.Struct, frozen=True):
    """How the text of each choice of a request is told apart.

    Attributes:
        new_parser: makes the parser of one choice.
        is_parallel: a choice may have several calls; otherwise it ends with its first.
        skipped_ids: tokens without text. All others have theirs, special ones too, because parsers look for it.
    """

    new_parser: Callable[[], Parser]
    is_parallel: bool = True
    skipped_ids: frozenset[int] = frozenset()


class OutputFormat:
    """How one model writes thoughts and calls."""

    def __init__(self, template: ChatTemplate | None, api: ApiConfig, eos_token_ids: Iterable[int]) -> None:
        """Raise StartupError (USAGE) for parsers that there are not or that do not go together."""
        source = "" if template is None else template.source
        try:
            found = select(source, api.tool_call_parser, api.reasoning_parser)
        except ValueError as problem:
            raise StartupError(ExitCode.USAGE, str(problem)) from problem
        is_auto = api.tool_call_parser == AUTO
        is_told_by_us = is_auto and (template is None or not template.knows_tools)
        self._family = found.family
        self._call_family = found.family if found.has_calls and not is_told_by_us else FALLBACK
        self._has_calls = found.has_calls or is_auto
        self._has_reasoning = found.has_reasoning
        self._eos_token_ids = frozenset(eos_token_ids)

    def reading(self, use: ToolUse, prompt: str) -> Reading | None:
        """Return how outputs are read that follow on `prompt`, a rendered conversation; None: all text is content."""
        tools = use.callable_tools if self._has_calls else ()
        family = self._call_family if tools else self._family
        if not tools and not self._has_reasoning:
            return None
        spec = ParserSpec(
            family,
            tools=tools,
            starts_in_reasoning=starts_in_reasoning(family, prompt),
            ends_generation_prompt=prompt[-NUM_ENDING_CHARACTERS:],
            has_reasoning=self._has_reasoning,
        )
        return Reading(partial(make_parser, spec), use.is_parallel, self._eos_token_ids)


def check_tool_use(use: ToolUse, param: str) -> None:
    """Raise ApiError that names `param`, the route's `tool_choice`, for what this server does not do."""
    if use.is_forced:
        raise unsupported(param, "that forces a call needs grammars, which this server does not have yet; use auto")
