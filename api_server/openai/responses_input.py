"""The items of a request for a response to messages, its tools to ours; every error names the place.

Items are smaller than messages: what an assistant thought, said and called in one turn are neighbours that become one
message, because chat templates know it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from octavo.api_server.conversation.messages import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    Message,
    PastCall,
    check_number_of_messages,
    decode_arguments,
)
from octavo.api_server.conversation.tools import (
    AllowedTools,
    FunctionSpec,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
    ToolFields,
    ToolUse,
    resolve_tools,
)
from octavo.api_server.errors import invalid_value, required, unsupported
from octavo.api_server.openai.responses_schemas import (
    InputItem,
    InputPart,
    ResponsesRequest,
    ToolChoiceObject,
    ToolMode,
)

ROLES = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM, "developer": SYSTEM}
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
MAX_PARTS = 64
TOOL_FIELDS = ToolFields(name="name", parameters="parameters")


def messages_of(items: str | Sequence[InputItem], instructions: str | None) -> tuple[Message, ...]:
    """Return the conversation in the internal form; raises ApiError."""
    if isinstance(items, str):
        return _with_instructions([Message(role=USER, content=items)], instructions)
    check_number_of_messages(len(items), "input")
    messages = [_message(item, f"input[{index}]") for index, item in enumerate(items)]
    return _with_instructions(_turns([each for each in messages if each is not None]), instructions)


def tool_use_of(body: ResponsesRequest) -> ToolUse:
    """Return what `body` lets the model call; raises ApiError."""
    tools = [
        Tool(
            type=tool.type,
            function=FunctionSpec(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            ),
        )
        for tool in body.tools or ()
    ]
    return resolve_tools(tools, _tool_choice(body.tool_choice), body.parallel_tool_calls, TOOL_FIELDS)


def _tool_choice(choice: ToolMode | ToolChoiceObject | None) -> ToolMode | ToolChoice | None:
    if not isinstance(choice, ToolChoiceObject):
        return choice
    function = None if choice.name is None else NamedFunction(name=choice.name)
    allowed = None
    if choice.tools is not None:
        names = [NamedTool(type=tool.type, function=NamedFunction(name=tool.name)) for tool in choice.tools]
        allowed = AllowedTools(mode=choice.mode or "auto", tools=names)
    return ToolChoice(type=choice.type, function=function, allowed_tools=allowed)


def _with_instructions(messages: list[Message], instructions: str | None) -> tuple[Message, ...]:
    """Put `instructions` first, and into the system's message if there is one: templates want at most one."""
    if not instructions:
        return tuple(messages)
    if messages and messages[0].role == SYSTEM:
        first, *messages = messages
        instructions = f"{instructions}\n\n{first.content}"
    return (Message(role=SYSTEM, content=instructions), *messages)


def _turns(messages: Sequence[Message]) -> list[Message]:
    """Join neighbours that are the assistant's."""
    turns: list[Message] = []
    for is_assistant, run in groupby(messages, lambda message: message.role == ASSISTANT):
        neighbours = list(run)
        turns.extend([_joined(neighbours)] if is_assistant else neighbours)
    return turns


def _joined(parts: Sequence[Message]) -> Message:
    thoughts = [part.reasoning for part in parts if part.reasoning]
    return Message(
        role=ASSISTANT,
        content="\n".join(part.content for part in parts if part.content),
        reasoning="\n".join(thoughts) or None,
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )


def _message(item: InputItem, param: str) -> Message | None:
    """Return what one item says; None if we cannot read it and it does not matter."""
    match item.type:
        case "message":
            if item.role not in ROLES:
                raise invalid_value(f"{param}.role", f"must be one of {', '.join(ROLES)}")
            return Message(role=ROLES[item.role], content=_text(item.content, f"{param}.content"))
        case "function_call":
            call = PastCall(
                item.call_id,
                required(item.name, f"{param}.name"),
                decode_arguments(item.arguments, f"{param}.arguments"),
            )
            return Message(role=ASSISTANT, tool_calls=(call,))
        case "function_call_output":
            call_id = required(item.call_id, f"{param}.call_id")
            return Message(role=TOOL, content=_text(item.output, f"{param}.output"), tool_call_id=call_id)
        case "reasoning":
            thought = _text(item.content, f"{param}.content") if item.content else ""
            return Message(role=ASSISTANT, reasoning=thought) if thought else None
        case "item_reference":
            raise unsupported(f"{param}.type", "item_reference is not supported: this server keeps no answers")
    raise unsupported(
        f"{param}.type", "must be message, function_call, function_call_output or reasoning: nothing else is supported"
    )


def _text(content: str | list[InputPart] | None, param: str) -> str:
    if isinstance(content, str):
        return content
    parts = required(content, param)
    if len(parts) > MAX_PARTS:
        raise invalid_value(param, f"has {len(parts)} parts, at most {MAX_PARTS}")
    return "\n".join(_part(part, f"{param}[{index}]") for index, part in enumerate(parts))


def _part(part: InputPart, param: str) -> str:
    if part.type == "refusal":
        return required(part.refusal, f"{param}.refusal")
    if part.type not in TEXT_PARTS:
        raise unsupported(f"{param}.type", "other than text is not supported: this server takes text only")
    return required(part.text, f"{param}.text")
