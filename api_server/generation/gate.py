"""Bodies to AddRequests: every check of a request that needs the model, the limits or several fields.

This is the one gate. Invariant: what leaves it is valid, and nothing behind it checks again; what it refuses is
refused by field name, before the engine core hears of it. Bounds of single sampling fields are in SamplingParams.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from octavo.api_server.api_keys import Tenant
from octavo.api_server.chat_template import ChatTemplateError
from octavo.api_server.conversation.messages import to_template_messages
from octavo.api_server.errors import ApiError, ErrorKind, invalid_value, unsupported
from octavo.api_server.generation.beam_search import beam_search_params, beam_width, check_beam_fields
from octavo.api_server.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest
from octavo.api_server.openai.unsupported import check_supported
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.config import EngineConfig, SchedulingPolicy
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
COMPLETION_MAX_TOKENS = 16  # OpenAI's default
CACHE_SALT = re.compile(r"[ -~]{0,128}")


class Submission(msgspec.Struct, frozen=True):
    """What one HTTP request asks of the engine core, and how its answer is given.

    Attributes:
        requests: choice j of prompt i is number i × n + j; of a beam search, prompt i is number i.
        num_choices_per_prompt: n.
    """

    requests: list[AddRequest]
    num_choices_per_prompt: int
    is_beam_search: bool
    stop: tuple[str, ...]
    skip_special_tokens: bool
    include_stop_string: bool
    is_streamed: bool
    has_usage: bool
    has_continuous_usage: bool

    @property
    def num_requests_per_prompt(self) -> int:
        return 1 if self.is_beam_search else self.num_choices_per_prompt

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt, however many choices it has."""
        return [len(request.prompt_token_ids) for request in self.requests[:: self.num_requests_per_prompt]]


class Gate:
    """The gate, for one model."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self.model = config.model
        self.max_choices = config.api.max_choices
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.has_priorities = config.scheduler.scheduling_policy is SchedulingPolicy.PRIORITY
        self.tokenizer = tokenizer

    def check(self, body: GenerationRequest) -> int:
        """Check all that needs no tokens; return the number of choices, or of beams. Raises ApiError."""
        check_model(body.model, self.model.served_model_names)
        check_supported(body)
        self._check_stops(body)
        if body.priority and not self.has_priorities:
            raise invalid_value("priority", "other than 0 needs a server with --scheduling-policy priority")
        if body.cache_salt is not None and not CACHE_SALT.fullmatch(body.cache_salt):
            raise invalid_value("cache_salt", "must be at most 128 printable ASCII characters")
        if body.stream_options is not None and not body.stream:
            raise invalid_value("stream_options", "is allowed only with stream: true")
        num_choices_per_prompt = _num_choices_per_prompt(body)
        check_beam_fields(body, num_choices_per_prompt, self.max_num_seqs)
        num_prompts = len(_prompts(body)) if isinstance(body, CompletionRequest) else 1
        num_choices = beam_width(body, num_choices_per_prompt) * num_prompts
        if num_choices > self.max_choices:
            param = "n" if body.best_of is None else "best_of"
            raise invalid_value(param, f"times the number of prompts is {num_choices}, at most {self.max_choices}")
        return num_choices

    async def prepare(self, body: ChatRequest | CompletionRequest, arrival_time_s: float, tenant: Tenant) -> Submission:
        """Turn a checked body into requests; raises ApiError."""
        if isinstance(body, CompletionRequest):
            prompts = [await self._completion_prompt(body, prompt) for prompt in _prompts(body)]
        else:
            prompts = [await self._chat_prompt(body)]
        n = _num_choices_per_prompt(body)
        seed = secrets.randbits(63) if body.seed in (None, -1) else body.seed
        requests = []
        for prompt in prompts:
            first = AddRequest(
                secrets.token_hex(16),
                prompt,
                self._sampling_params(body, len(prompt), seed),
                arrival_time_s,
                priority=body.priority or 0,
                cache_salt=tenant.cache_salt(body.cache_salt or ""),
                tenant=tenant.name,
                tenant_weight=tenant.weight,
            )
            requests += [self._beam_request(body, first, n)] if body.use_beam_search else _choices_of(first, n)
        options = body.stream_options
        return Submission(
            requests=requests,
            num_choices_per_prompt=n,
            is_beam_search=bool(body.use_beam_search),
            stop=_stop_strings(body),
            skip_special_tokens=body.skip_special_tokens is not False,
            include_stop_string=bool(body.include_stop_str_in_output),
            is_streamed=bool(body.stream),
            has_usage=options is not None and bool(options.include_usage),
            has_continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )

    def _check_stops(self, body: GenerationRequest) -> None:
        strings = _stop_strings(body)
        if len(strings) > MAX_STOP_STRINGS:
            raise invalid_value("stop", f"has {len(strings)} strings, at most {MAX_STOP_STRINGS}")
        if not all(1 <= len(string) <= MAX_STOP_CHARS for string in strings):
            raise invalid_value("stop", f"strings must have 1 to {MAX_STOP_CHARS} characters")
        ids = body.stop_token_ids or []
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise invalid_value("stop_token_ids", f"has {len(ids)} ids, at most {MAX_STOP_TOKEN_IDS}")
        self._check_token_ids("stop_token_ids", ids)

    def _check_token_ids(self, param: str, token_ids: Sequence[int]) -> None:
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self.model.vocab_size):
            raise invalid_value(param, f"must be token ids in [0, {self.model.vocab_size})")

    async def _chat_prompt(self, body: ChatRequest) -> list[int]:
        messages = to_template_messages(body.messages)
        template = self.tokenizer.chat_template
        if template is None:
            raise unsupported("messages", "needs a chat template, which this model lacks; use /v1/completions")
        try:
            text = await template.render_off_loop(messages)
        except ChatTemplateError as problem:
            raise invalid_value("messages", f"cannot be rendered by the model's chat template: {problem}") from None
        return await self.tokenizer.encode_off_loop(text, add_special_tokens=False)

    async def _completion_prompt(self, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await self.tokenizer.encode_off_loop(prompt, add_special_tokens=body.add_special_tokens is not False)
        self._check_token_ids("prompt", prompt)
        return prompt

    def _beam_request(self, body: GenerationRequest, request: AddRequest, n: int) -> AddRequest:
        search = beam_search_params(body, n)
        params = msgspec.structs.replace(request.sampling_params, temperature=0.0)
        return msgspec.structs.replace(request, sampling_params=params, beam_search=search)

    def _sampling_params(self, body: GenerationRequest, num_prompt_tokens: int, seed: int | None) -> SamplingParams:
        options: dict[str, Any] = {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": 0 if body.top_k == -1 else body.top_k,
            "min_p": body.min_p,
            "min_tokens": body.min_tokens,
            "ignore_eos": body.ignore_eos,
            "seed": seed,
        }
        given = {name: value for name, value in options.items() if value is not None}
        max_tokens = self._max_tokens(body, num_prompt_tokens)
        try:
            return SamplingParams(max_tokens, stop_token_ids=tuple(body.stop_token_ids or ()), **given)
        except ValueError as problem:  # its text begins with the field's name, by contract
            raise ApiError(ErrorKind.INVALID_VALUE, str(problem), str(problem).split(" ", 1)[0]) from None

    def _max_tokens(self, body: GenerationRequest, num_prompt_tokens: int) -> int:
        limit = self.model.max_model_len
        if num_prompt_tokens == 0:
            raise invalid_value("prompt", "has no tokens")
        param = "prompt" if isinstance(body, CompletionRequest) else "messages"
        room = limit - num_prompt_tokens
        if room < 1:
            text = f"the prompt has {num_prompt_tokens} tokens, which leaves no room in the context of {limit} tokens"
            raise ApiError(ErrorKind.CONTEXT_LENGTH_EXCEEDED, text, param)
        name, max_tokens = _asked_max_tokens(body)
        if max_tokens is None:
            return min(room, COMPLETION_MAX_TOKENS) if isinstance(body, CompletionRequest) else room
        if max_tokens < 1:
            raise invalid_value(name, f"must be at least 1, got {max_tokens}")
        if max_tokens > room:
            text = f"the prompt has {num_prompt_tokens} tokens and {name} is {max_tokens}"
            text = f"{text}, together more than the context of {limit} tokens"
            raise ApiError(ErrorKind.CONTEXT_LENGTH_EXCEEDED, text, name)
        return max_tokens


def _choices_of(first: AddRequest, n: int) -> list[AddRequest]:
    """Return `first` and n - 1 further choices of its prompt, which share its blocks."""
    return [
        first,
        *(
            msgspec.structs.replace(
                first,
                request_id=secrets.token_hex(16),
                sampling_params=msgspec.structs.replace(first.sampling_params, choice_index=index),
                fork_of=first.request_id,
            )
            for index in range(1, n)
        ),
    ]


def check_model(name: str, served_model_names: Sequence[str]) -> None:
    """Raise ApiError (404) unless `name` is served."""
    if name not in served_model_names:
        served = ", ".join(served_model_names)
        raise ApiError(ErrorKind.MODEL_NOT_FOUND, f"the model does not exist; this server has: {served}", "model")


def _asked_max_tokens(body: GenerationRequest) -> tuple[str, int | None]:
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def _num_choices_per_prompt(body: GenerationRequest) -> int:
    n = 1 if body.n is None else body.n
    if n < 1:
        raise invalid_value("n", f"must be at least 1, got {n}")
    return n


def _stop_strings(body: GenerationRequest) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of any of the four forms: a string, strings, token ids, lists of token ids."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    kinds = {type(item) for item in body.prompt}
    if len(kinds) != 1:
        raise invalid_value("prompt", "must be a string, token ids, or a list that is not empty of one of these")
    prompts = [body.prompt] if kinds == {int} else body.prompt
    return cast("list[str | list[int]]", prompts)
