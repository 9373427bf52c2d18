"""Drafts to jobs: every check of a request that needs the model, the limits or several fields.

This is the one gate. Invariant: what leaves it is valid, and nothing behind it checks again; what it refuses is
refused by field name, before the engine core hears of it. Ranges of single fields are in the types of the bodies.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import msgspec

from octavo.api_server.api_keys import Tenant
from octavo.api_server.errors import ApiError, ErrorKind, invalid_value, unsupported
from octavo.api_server.generation.beam_search import beam_search_params, check_beam_fields, name_of_width
from octavo.api_server.generation.job import Conversation, Draft, Job
from octavo.api_server.generation.parsing import OutputFormat, Reading, check_tool_use
from octavo.api_server.generation.prompts import Prompt, encode_prompts, truncated
from octavo.api_server.generation.sampling_fields import SamplingReader, check_token_ids, sampling_params_of
from octavo.api_server.generation.token_log import prompt_text
from octavo.api_server.tokenizer import Tokenizer
from octavo.protocol.config import EngineConfig, SchedulingPolicy
from octavo.protocol.engine_messages import AddRequest
from octavo.protocol.sampling_params import NO_LOGPROBS, SamplingParams

MAX_LOGPROB_ENTRIES = 4 * 2**20  # of one HTTP request: 34 MB on the wire between the processes


class Gate:
    """The gate, for one model."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        """Raise StartupError for a format of outputs that there is not."""
        self.model = config.model
        self.max_choices = config.api.max_choices
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.has_priorities = config.scheduler.scheduling_policy is SchedulingPolicy.PRIORITY
        self.tokenizer = tokenizer
        self.sampling = SamplingReader(config.model, tokenizer)
        self.output_format = OutputFormat(tokenizer.chat_template, config.api, config.model.eos_token_ids)

    def check(self, draft: Draft) -> int:
        """Check all that needs no tokens; return the number of choices, or of beams. Raises ApiError."""
        check_model(draft.model, self.model.served_model_names)
        self.sampling.check(draft)
        if draft.priority and not self.has_priorities:
            raise invalid_value("priority", "other than 0 needs a server with --scheduling-policy priority")
        if draft.truncate_prompt_tokens == 0:
            raise invalid_value("truncate_prompt_tokens", "must be -1 or at least 1, got 0")
        if draft.rendering.is_streamed and draft.rendering.num_prompt_logprobs != NO_LOGPROBS:
            raise unsupported("prompt_logprobs", "are not given in a stream")
        if isinstance(draft.prompts, Conversation):
            check_tool_use(draft.prompts.tool_use, draft.param("tool_choice"))
        if draft.beam_search is not None:
            check_beam_fields(draft, self.max_num_seqs)
        num_choices = draft.num_choices * draft.num_prompts
        if num_choices > self.max_choices:
            rule = f"times the number of prompts is {num_choices}, at most {self.max_choices}"
            raise invalid_value(name_of_width(draft), rule)
        return num_choices

    async def prepare(self, draft: Draft, arrival_time_s: float, tenant: Tenant) -> Job:
        """Turn a checked draft into a job; raises ApiError."""
        prompts = await self._prompts(draft)
        prompt_ids = [prompt.token_ids for prompt in prompts]
        requests: list[AddRequest] = []
        for token_ids, params in zip(prompt_ids, await self._sampling_params(draft, prompt_ids), strict=True):
            first = AddRequest(
                secrets.token_hex(16),
                token_ids,
                params,
                arrival_time_s,
                priority=draft.priority,
                cache_salt=tenant.cache_salt(draft.cache_salt),
                tenant=tenant.name,
                tenant_weight=tenant.weight,
            )
            requests += _choices_of(first, draft.n) if draft.beam_search is None else [_beam_request(first, draft)]
        return Job(
            requests=requests,
            n=draft.n,
            is_beam_search=draft.beam_search is not None,
            stop=draft.stop,
            rendering=draft.rendering,
            echoed=await self._echoed(draft, prompt_ids),
            drops_output=draft.sampling.max_tokens == 0,
            reading=self._reading(draft, prompts[0]),
        )

    async def _prompts(self, draft: Draft) -> list[Prompt]:
        """Return each prompt, its tokens cut as the draft says."""
        prompts = []
        for prompt in await encode_prompts(draft, self.tokenizer):
            token_ids = truncated(draft, prompt.token_ids, self.model.max_model_len)
            check_token_ids(draft.param("prompt"), token_ids, self.model.vocab_size)
            prompts.append(Prompt(token_ids, prompt.text))
        return prompts

    async def _sampling_params(self, draft: Draft, prompts: Sequence[list[int]]) -> list[SamplingParams]:
        """Return the parameters of the first choice of each prompt; all choices share the seed."""
        seed = draft.sampling.seed
        seed = secrets.randbits(63) if seed is None or seed == -1 else seed
        options = await self.sampling.options(draft)
        params = [sampling_params_of(draft, self._max_tokens(draft, len(prompt)), seed, options) for prompt in prompts]
        _check_number_of_logprobs(draft, prompts, params)
        return params

    def _reading(self, draft: Draft, prompt: Prompt) -> Reading | None:
        if not isinstance(draft.prompts, Conversation):
            return None
        return self.output_format.reading(draft.prompts.tool_use, prompt.text)

    async def _echoed(self, draft: Draft, prompts: Sequence[list[int]]) -> tuple[str, ...]:
        if not draft.rendering.echo:
            return ()
        skip = draft.rendering.skip_special_tokens
        return tuple([await asyncio.to_thread(prompt_text, self.tokenizer, prompt, skip) for prompt in prompts])

    def _max_tokens(self, draft: Draft, num_prompt_tokens: int) -> int:
        """Return how many tokens the engine core may generate; one for a client that wants none."""
        limit = self.model.max_model_len
        prompt_param = draft.param("prompt")
        if num_prompt_tokens == 0:
            raise invalid_value(prompt_param, "has no tokens")
        name, max_tokens = draft.param("max_tokens"), draft.sampling.max_tokens
        room = limit - num_prompt_tokens
        if room < (0 if max_tokens == 0 else 1):
            text = f"the prompt has {num_prompt_tokens} tokens, which leaves no room in the context of {limit} tokens"
            raise ApiError(ErrorKind.CONTEXT_LENGTH_EXCEEDED, text, prompt_param)
        if max_tokens is None:
            return min(room, draft.default_max_tokens or self.model.default_sampling.max_new_tokens or room)
        if max_tokens > room:
            text = f"the prompt has {num_prompt_tokens} tokens and {name} is {max_tokens}"
            text = f"{text}, together more than the context of {limit} tokens"
            raise ApiError(ErrorKind.CONTEXT_LENGTH_EXCEEDED, text, name)
        return max(1, max_tokens)


def _check_number_of_logprobs(draft: Draft, prompts: Sequence[list[int]], all_params: Sequence[SamplingParams]) -> None:
    """Raise ApiError if the answer would have more logprobs than one request may ask for."""
    num_entries = 0
    for prompt, params in zip(prompts, all_params, strict=True):
        num_entries += len(prompt) * (1 + params.num_prompt_logprobs)
        num_entries += draft.n * params.max_tokens * (1 + params.num_logprobs)
    if num_entries > MAX_LOGPROB_ENTRIES:
        rule = f"could give {num_entries} logprobs, at most {MAX_LOGPROB_ENTRIES}; lower n, the length or the number"
        raise invalid_value(draft.param("logprobs"), rule)


def check_model(name: str, served_model_names: Sequence[str]) -> None:
    """Raise ApiError (404) unless `name` is served."""
    if name not in served_model_names:
        served = ", ".join(served_model_names)
        raise ApiError(ErrorKind.MODEL_NOT_FOUND, f"the model does not exist; this server has: {served}", "model")


def _choices_of(first: AddRequest, n: int) -> list[AddRequest]:
    """Return `first` and n - 1 further choices of its prompt, which share its blocks and its prompt's logprobs."""
    return [
        first,
        *(
            msgspec.structs.replace(
                first,
                request_id=secrets.token_hex(16),
                sampling_params=msgspec.structs.replace(
                    first.sampling_params, choice_index=index, num_prompt_logprobs=NO_LOGPROBS
                ),
                fork_of=first.request_id,
            )
            for index in range(1, n)
        ),
    ]


def _beam_request(request: AddRequest, draft: Draft) -> AddRequest:
    params = msgspec.structs.replace(request.sampling_params, temperature=0.0)
    return msgspec.structs.replace(request, sampling_params=params, beam_search=beam_search_params(draft))
