"""What Anthropic's bodies say to messages and tools; every error names the place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from octavo.api_server.anthropic.schemas import CountTokensRequest, InputBlock, InputMessage, ToolDefinition
from octavo.api_server.conversation.messages import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    Message,
    PastCall,
    check_number_of_messages,
)
from octavo.api_server.conversation.tools import (
    FunctionSpec,
    Mode,
    NamedFunction,
    Tool,
    ToolChoice,
    ToolFields,
    ToolUse,
    resolve_tools,
)
from octavo.api_server.errors import invalid_value, required, unsupported
from octavo.api_server.generation.job import Conversation

MAX_BLOCKS = 1024
TOOL_FIELDS = ToolFields(name="name", parameters="input_schema")
MODES: dict[str, Mode] = {"auto": "auto", "any": "required", "none": "none"}


def conversation_of(body: CountTokensRequest) -> Conversation:
    """Return the prompt; raises ApiError. A last message of the assistant is gone on with, unless it calls."""
    check_number_of_messages(len(body.messages), "messages")
    messages = [
        message for index, each in enumerate(body.messages) for message in _messages_of(each, f"messages[{index}]")
    ]
    if body.system:
        messages.insert(0, Message(role=SYSTEM, content=_text(body.system, "system")))
    continues = messages[-1].role == ASSISTANT and not messages[-1].tool_calls
    return Conversation(
        messages=tuple(messages),
        adds_generation_prompt=not continues,
        continues_final_message=continues,
        template_options={} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"},
    )


def tool_use_of(body: CountTokensRequest) -> ToolUse:
    """Return what `body` lets the model call; raises ApiError."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    choice = body.tool_choice
    if choice is None:
        return resolve_tools(tools, fields=TOOL_FIELDS)
    if choice.type == "tool":
        name = required(choice.name, "tool_choice.name")
        mode: Mode | ToolChoice = ToolChoice(type="function", function=NamedFunction(name=name))
    else:
        mode = MODES[choice.type]
    return resolve_tools(tools, mode, not choice.disable_parallel_tool_use, TOOL_FIELDS)


def _tool(tool: ToolDefinition, param: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise unsupported(f"{param}.type", "must be custom: this server has no tools of its own")
    schema = required(tool.input_schema, f"{param}.input_schema")
    return Tool(
        function=FunctionSpec(name=tool.name, description=tool.description, parameters=schema, strict=tool.strict)
    )


def _messages_of(message: InputMessage, param: str) -> Iterator[Message]:
    if isinstance(message.content, str):
        yield Message(role=message.role, content=message.content)
        return
    blocks, param = message.content, f"{param}.content"
    if not 1 <= len(blocks) <= MAX_BLOCKS:
        raise invalid_value(param, f"must have 1 to {MAX_BLOCKS} blocks, has {len(blocks)}")
    yield from _of_user(blocks, param) if message.role == USER else [_of_assistant(blocks, param)]


def _of_user(blocks: Sequence[InputBlock], param: str) -> Iterator[Message]:
    """Yield a message for each result of a tool, and for the texts around them."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        where = f"{param}[{index}]"
        if block.type != "tool_result":
            texts.append(_text_of_block(block, where))
            continue
        if texts:
            yield Message(role=USER, content="\n".join(texts))
            texts = []
        call_id = required(block.tool_use_id, f"{where}.tool_use_id")
        yield Message(role=TOOL, content=_text(block.content or "", f"{where}.content"), tool_call_id=call_id)
    if texts:
        yield Message(role=USER, content="\n".join(texts))


def _of_assistant(blocks: Sequence[InputBlock], param: str) -> Message:
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        where = f"{param}[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(required(block.thinking, f"{where}.thinking"))
            case "redacted_thinking":  # nobody but its author can read it
                continue
            case "tool_use":
                name = required(block.name, f"{where}.name")
                calls.append(PastCall(block.id, name, required(block.input, f"{where}.input")))
            case _:
                texts.append(_text_of_block(block, where))
    return Message(
        role=ASSISTANT, content="\n".join(texts), reasoning="\n".join(thoughts) or None, tool_calls=tuple(calls)
    )


def _text(content: str | Sequence[InputBlock], param: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text_of_block(block, f"{param}[{index}]") for index, block in enumerate(content))


def _text_of_block(block: InputBlock, param: str) -> str:
    if block.type != "text":
        raise unsupported(f"{param}.type", f"{block.type[:32]!r} is not supported here: this server takes text only")
    return required(block.text, f"{param}.text")
