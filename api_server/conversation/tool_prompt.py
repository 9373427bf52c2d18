"""Tools for models whose chat template knows none: they are explained in the system message, in Hermes' words.

Earlier turns are put into the same words, because such a template leaves calls out and refuses the role `tool`: calls
become text of the assistant's message, and what tools said becomes a message of the user. `parsers.hermes` reads the
answer. Rejected: adding to the operator's template, which may be anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from octavo.api_server.conversation.tools import Tool, template_tools

INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
INSTRUCTION = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

Message = dict[str, Any]


def spell_out_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return messages for a template that knows no tools.

    Args:
        messages: as templates get them: role, content as text, `tool_calls` with `function.name` and
            `function.arguments` as an object or as JSON text.
        tools: tools to explain; none when only earlier turns have to be put into words.
    """
    spelled: list[Message] = []
    for is_response, run in groupby(messages, lambda message: message["role"] == "tool"):
        if is_response:  # answers to the calls of one turn share a message
            texts = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in run)
            spelled.append({"role": "user", "content": "\n".join(texts)})
        else:
            spelled.extend(map(_spell_calls, run))
    return _explain(spelled, tools) if tools else spelled


def _explain(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """Put the tools behind what the system message says, or into a new one."""
    text = INTRODUCTION + "\n".join(msgspec.json.encode(tool).decode() for tool in template_tools(tools)) + INSTRUCTION
    if messages and messages[0]["role"] == "system":
        content = f"{messages[0]['content']}\n\n{text}" if messages[0]["content"] else text
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _spell_calls(message: Message) -> Message:
    """Put the calls of an assistant's message into its text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (message.get("content"), *texts)))}


def _call_text(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return f'{{"name": {msgspec.json.encode(function["name"]).decode()}, "arguments": {text or "{}"}}}'
