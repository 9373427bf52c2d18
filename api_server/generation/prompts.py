"""Prompts of every form to token ids: text, ids, and conversations by the model's chat template."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from octavo.api_server.chat_template import ChatTemplate, ChatTemplateError, TemplateOptionError
from octavo.api_server.conversation.call_ids import with_fitting_ids
from octavo.api_server.conversation.messages import Message, to_template_messages
from octavo.api_server.conversation.tool_prompt import spell_out_tools
from octavo.api_server.conversation.tools import Tool, template_tools
from octavo.api_server.errors import invalid_value, unsupported
from octavo.api_server.generation.job import Conversation, Draft
from octavo.api_server.tokenizer import Tokenizer


class Prompt(NamedTuple):
    """A prompt as token ids, and its text where it is a conversation; other texts are not looked at again."""

    token_ids: list[int]
    text: str = ""


async def encode_prompts(draft: Draft, tokenizer: Tokenizer) -> list[Prompt]:
    """Return each prompt, however many; raises ApiError. Ids of the client are returned unchecked."""
    if isinstance(draft.prompts, Conversation):
        text = await render(draft, draft.prompts, tokenizer.chat_template)
        return [Prompt(await tokenizer.encode_off_loop(text, add_special_tokens=False), text)]
    return [
        Prompt(await tokenizer.encode_off_loop(prompt, draft.add_special_tokens) if isinstance(prompt, str) else prompt)
        for prompt in draft.prompts
    ]


def truncated(draft: Draft, token_ids: list[int], max_model_len: int) -> list[int]:
    """Return the last tokens of a prompt, as many as the draft keeps."""
    num_kept = draft.truncate_prompt_tokens
    if num_kept is None:
        return token_ids
    if num_kept == -1:
        max_tokens = draft.sampling.max_tokens
        num_kept = max_model_len - (max_tokens if max_tokens is not None else draft.default_max_tokens or 1)
    return token_ids[-num_kept:] if num_kept > 0 else token_ids


async def render(draft: Draft, conversation: Conversation, template: ChatTemplate | None) -> str:
    """Return the text of the prompt; raises ApiError."""
    if template is None:
        raise unsupported(draft.param("prompt"), "needs a chat template, which this model lacks; use /v1/completions")
    if conversation.continues_final_message:
        return await _render_continued(draft, conversation, template)
    return await _render(draft, conversation, conversation.messages, template)


async def _render_continued(draft: Draft, conversation: Conversation, template: ChatTemplate) -> str:
    """Return a prompt that ends with exactly the text of the last message, whatever the template does to the text.

    The template gets a word that nobody else says in place of that text, and the prompt is cut there.
    """
    *before, last = conversation.messages
    word = secrets.token_hex(16)
    text = await _render(draft, conversation, [*before, msgspec.structs.replace(last, content=word)], template)
    head, found, _ = text.rpartition(word)
    if not found:
        rule = "end with a message that the model's chat template does not show, so it cannot be continued"
        raise invalid_value(draft.param("prompt"), rule)
    return head + last.content


async def _render(draft: Draft, conversation: Conversation, messages: Sequence[Message], template: ChatTemplate) -> str:
    shown, tools = _shown(to_template_messages(messages), conversation.tool_use.tools, template)
    try:
        return await template.render_off_loop(
            shown, conversation.adds_generation_prompt, tools, **conversation.template_options
        )
    except TemplateOptionError as problem:
        raise invalid_value(draft.param("chat_template_kwargs"), str(problem)) from None
    except ChatTemplateError as problem:
        rule = f"cannot be rendered by the model's chat template: {problem}"
        raise invalid_value(draft.param("prompt"), rule) from None


def _shown(
    messages: list[dict[str, Any]], tools: Sequence[Tool], template: ChatTemplate
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return messages and tools for a template: one that knows no tools gets them, and earlier calls, as text."""
    if template.knows_tools:
        return with_fitting_ids(messages, template.source), template_tools(tools)
    return spell_out_tools(messages, tools), []
