"""POST /tokenize and POST /detokenize: what the model's tokenizer makes of a text, of a conversation, and of tokens.

A conversation becomes the very tokens that POST /v1/chat/completions would compute. Nothing is generated and nothing is
bounded by the context: who asks may want to know how much too long a prompt is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from octavo.api_server.errors import invalid_value, unsupported
from octavo.api_server.generation.gate import check_model
from octavo.api_server.generation.job import Conversation, Draft
from octavo.api_server.generation.prompts import encode_prompts
from octavo.api_server.generation.run import Generator
from octavo.api_server.health import ServerState, json_response
from octavo.api_server.http.body import read_body
from octavo.api_server.openai.chat_messages import messages_of
from octavo.api_server.openai.chat_schemas import ChatMessage
from octavo.api_server.openai.common_schemas import TokenId


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize.

    Attributes:
        prompt: a text; either this or messages.
        messages: a conversation, as in POST /v1/chat/completions.
        return_token_strs: show the text of each token too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    return_token_strs: bool | None = None
    tools: Any = None


class TokenizeAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Answer of POST /tokenize.

    Attributes:
        count: number of tokens.
        token_strs: the text of each token alone; a part of a character shows as U+FFFD.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize.

    Attributes:
        tokens: token ids.
    """

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """Answer of POST /detokenize.

    Attributes:
        prompt: the text, that of special tokens included.
    """

    prompt: str


class TokenizerRoutes:
    """Handlers of both."""

    def __init__(self, generator: Generator, state: ServerState) -> None:
        self.generator = generator
        self.state = state
        self.model = generator.gate.model
        self.tokenizer = generator.gate.tokenizer
        self.tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
        self.detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)

    async def tokenize(self, request: web.Request) -> web.Response:
        self.state.check_accepting()
        with self.generator.admit():
            body = await read_body(request, self.tokenize_decoder)
            self._check_model(body.model)
            ((token_ids, _),) = await encode_prompts(draft_of(body), self.tokenizer)
            answer = TokenizeAnswer(count=len(token_ids), max_model_len=self.model.max_model_len, tokens=token_ids)
            if body.return_token_strs:
                answer.token_strs = await asyncio.to_thread(self._token_texts, token_ids)
            return json_response(answer)

    async def detokenize(self, request: web.Request) -> web.Response:
        self.state.check_accepting()
        with self.generator.admit():
            body = await read_body(request, self.detokenize_decoder)
            self._check_model(body.model)
            if max(body.tokens, default=0) >= self.model.vocab_size:
                raise invalid_value("tokens", f"must be token ids in [0, {self.model.vocab_size})")
            text = await self.tokenizer.decode_off_loop(body.tokens, skip_special_tokens=False)
            return json_response(DetokenizeAnswer(prompt=text))

    def _check_model(self, name: str | None) -> None:
        if name is not None:
            check_model(name, self.model.served_model_names)

    def _token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.token_text(token_id) for token_id in token_ids]


def draft_of(body: TokenizeRequest) -> Draft:
    """Return the prompt that `body` describes as a draft; pure. Raises ApiError for fields that do not go together."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid_value("prompt", "or messages must be given, and not both")
    if body.tools:
        raise unsupported("tools")
    if body.prompt is not None:
        return Draft(
            model=body.model or "", prompts=(body.prompt,), add_special_tokens=body.add_special_tokens is not False
        )
    if body.add_special_tokens:
        raise invalid_value("add_special_tokens", "is for prompt: a chat template writes the special tokens itself")
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid_value("continue_final_message", "and add_generation_prompt cannot both be true")
    return Draft(
        model=body.model or "",
        prompts=Conversation(
            messages=messages_of(body.messages or ()),
            adds_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continues_final_message=bool(body.continue_final_message),
            template_options=body.chat_template_kwargs or {},
        ),
    )
