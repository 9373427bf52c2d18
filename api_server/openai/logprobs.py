"""Logprobs in the three forms of the API: of chats, of completions, and of prompts.

A token is named by its text. Bytes that are no text by themselves show as U+FFFD in chats, which have the exact bytes
as well; in completions, where texts are keys and must tell tokens apart, as `bytes:\\xe2\\x80`, which is OpenAI's way.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from octavo.api_server.generation.job import TokenEntry, TokenScore


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Lists of one entry for each token. `text_offset` counts characters from the beginning of `text`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(msgspec.Struct):
    """`rank` is 1 for the likeliest token; it is left out for a token that is not among those listed."""

    logprob: float
    decoded_token: str
    rank: int | UnsetType = UNSET


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


def chat_logprobs(entries: Sequence[TokenEntry], shows_ids: bool) -> ChatLogprobs:
    """Return the logprobs of a chat's choice; `shows_ids` names tokens by their ids."""
    content = []
    for own, likeliest, _ in entries:
        top = [TopLogprob(*_named(score, shows_ids)) for score in likeliest]
        content.append(ChatTokenLogprob(*_named(own, shows_ids), top))
    return ChatLogprobs(content)


def completion_logprobs(entries: Sequence[TokenEntry], shows_ids: bool) -> CompletionLogprobs:
    """Return the logprobs of a completion's choice; the lists of likeliest tokens always have the token itself too."""
    return CompletionLogprobs(
        [_key(entry.own, shows_ids) for entry in entries],
        [entry.own.logprob for entry in entries],
        [_top_of(entry, shows_ids) for entry in entries],
        [entry.offset for entry in entries],
    )


def prompt_logprobs(entries: Sequence[TokenEntry], num_listed: int) -> PromptLogprobs:
    """Return the logprobs of a prompt, by token id, with `num_listed` of the likeliest tokens in each place."""
    return [_by_id(entry, num_listed) for entry in entries]


def _named(score: TokenScore, shows_ids: bool) -> tuple[str, float, list[int]]:
    token = f"token_id:{score.token_id}" if shows_ids else score.text.decode(errors="replace")
    return token, score.logprob or 0.0, list(score.text)


def _key(score: TokenScore, shows_ids: bool) -> str:
    if shows_ids:
        return f"token_id:{score.token_id}"
    try:
        return score.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in score.text)


def _top_of(entry: TokenEntry, shows_ids: bool) -> dict[str, float] | None:
    if entry.own.logprob is None:
        return None
    top = {_key(entry.own, shows_ids): entry.own.logprob}
    for score in entry.likeliest:
        top.setdefault(_key(score, shows_ids), score.logprob or 0.0)
    return top


def _by_id(entry: TokenEntry, num_listed: int) -> dict[str, PromptTokenLogprob] | None:
    if entry.own.logprob is None:
        return None
    listed = {
        str(score.token_id): _prompt_token(score, rank) for rank, score in enumerate(entry.likeliest[:num_listed], 1)
    }
    return {str(entry.own.token_id): _prompt_token(entry.own, UNSET), **listed}


def _prompt_token(score: TokenScore, rank: int | UnsetType) -> PromptTokenLogprob:
    return PromptTokenLogprob(score.logprob or 0.0, score.text.decode(errors="replace"), rank)
