"""Messages to prompt: renders a model's chat template as transformers' `apply_chat_template` does.

The template is the operator's, the messages are the client's. So the template is compiled once at start and is a
program with a budget: sandboxed, off the event loop, cut when its time or its output is used up. Time is checked by a
call planted into every loop and macro, at each turn; memory inside a single expression is not bounded, because whoever
chose the template answers for it. Invariant: whatever messages do to a template, the caller sees a ChatTemplateError.
Rejected: a helper process (a round trip for each chat, for a program that the operator trusts) and an asynchronous
exception (needs ctypes, and lands anywhere).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, meta, nodes, parser, sandbox, utils

from octavo.protocol.lifecycle import ExitCode, StartupError

DEFAULT_TIMEOUT_S = 2.0
DEFAULT_MAX_OUTPUT_CHARS = 16 * 2**20
MAX_REFUSAL_CHARS = 500
MAX_SHOWN_NAME_CHARS = 64
ALLOWED_EXTRA = frozenset({"enable_thinking", "thinking", "reasoning_effort", "date_string"})

logger = logging.getLogger(__name__)
_deadline_s: ContextVar[float] = ContextVar("deadline_s")


class ChatTemplateError(Exception):
    """These messages cannot be rendered: a client error. The text is for the client and names no path."""


class TemplateOptionError(ChatTemplateError):
    """An option that templates do not get; the text reads on after the name of the client's field."""


class BudgetError(Exception):
    """A rendering used up its time or its output."""


class RefusalError(jinja2.TemplateError):
    """The template itself refused the messages, by `raise_exception`."""


class ChatTemplate:
    """One compiled template; safe to use from several threads.

    Attributes:
        source: its text.
        knows_tools: it says something about the tools that it is given.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_output_chars: int = DEFAULT_MAX_OUTPUT_CHARS,
    ) -> None:
        """Compile `source`; raises StartupError with the line when that is not possible."""
        self._special_tokens = special_tokens
        self._timeout_s = timeout_s
        self._max_output_chars = max_output_chars
        environment = _environment()
        self.source = source
        try:
            self._template = environment.from_string(source)
            self.knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as problem:
            message = f"chat template, line {problem.lineno}: {problem.message}"
            raise StartupError(ExitCode.UNSUPPORTED_MODEL, message) from problem

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        /,  # clients choose the names that follow
        **extra: bool | int | float | str,
    ) -> str:
        """Return the prompt; raises ChatTemplateError. Blocks up to the timeout: on an event loop use render_off_loop.

        A missing content or one that is null is rendered as empty text, other null fields as missing ones. `tools` are
        in OpenAI's form; without any they are None, because many templates ask for that alone.
        """
        _check_extra(extra)
        variables = {
            **self._special_tokens,
            **extra,
            "messages": [_without_nulls(message) for message in messages],
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        token = _deadline_s.set(time.monotonic() + self._timeout_s)
        try:
            return self._render_within_budget(variables)
        except Exception as problem:  # a template may raise anything
            raise _client_error(problem) from problem
        finally:
            _deadline_s.reset(token)

    async def render_off_loop(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        /,
        **extra: bool | int | float | str,
    ) -> str:
        """Render in a thread."""
        return await asyncio.to_thread(self.render, messages, add_generation_prompt, tools, **extra)

    def _render_within_budget(self, variables: dict[str, Any]) -> str:
        pieces = []
        num_chars_left = self._max_output_chars
        for piece in self._template.generate(variables):
            num_chars_left -= len(piece)
            if num_chars_left < 0:
                raise BudgetError("output")
            pieces.append(piece)
        return "".join(pieces)


def _check_extra(extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        if name not in ALLOWED_EXTRA:
            allowed = ", ".join(sorted(ALLOWED_EXTRA))
            raise TemplateOptionError(f"has {name[:MAX_SHOWN_NAME_CHARS]!r}, and may have only {allowed}")
        if not isinstance(value, bool | int | float | str):
            raise TemplateOptionError(f"must have a boolean, a number or a string as {name}")


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if value is not None or name == "content"}
    kept["content"] = kept.get("content") or ""
    return kept


def _client_error(problem: Exception) -> ChatTemplateError:
    """Only what the template says itself reaches the client, and which name is missing; the rest is fixed text."""
    match problem:
        case RefusalError() | jinja2.UndefinedError():
            return ChatTemplateError(str(problem.message)[:MAX_REFUSAL_CHARS])
        case BudgetError():
            return ChatTemplateError("rendering takes too long or gives too much output")
        case _:
            logger.warning("chat template failed: %s", type(problem).__name__)
            return ChatTemplateError("the template fails on these messages")


def _check_time() -> None:
    if time.monotonic() > _deadline_s.get():
        raise BudgetError("time")


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a look at the clock planted into everything that can repeat."""

    check_time = staticmethod(_check_time)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for node in source.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            _plant_time_check(node)
        return super()._generate(source, *args, **kwargs)


def _plant_time_check(node: Any) -> None:
    """Make a call of `check_time` the first statement of a loop's or macro's body."""
    call = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
    node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))


class _GenerationTag(ext.Extension):
    """`{% generation %}` marks the assistant's text for training; for a server it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's set

    def parse(self, stream: parser.Parser) -> nodes.Node:
        lineno = next(stream.stream).lineno
        return nodes.Scope(stream.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Namespace(utils.Namespace):
    """Jinja's namespace without names that mean something to Python, so that no template forges a protocol method."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be one of the names
        for name in dict(*args[1:], **kwargs):
            _check_attribute(name)
        utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have an attribute {name!r}")


def _raise_exception(message: object) -> None:
    raise RefusalError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(time_format: str) -> str:
    return datetime.now().strftime(time_format)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
    }
    return environment
