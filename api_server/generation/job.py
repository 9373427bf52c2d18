"""The internal form of every request for text, whatever API it came in by, and of what comes out.

A route turns its body into a `Draft` by pure code. The gate makes a `Job` of it: token ids, checked parameters, ready
for the engine core. A run of the job gives `OutputEvent`s, which a renderer of the route turns into bytes. So two
routes differ in two places only, body to Draft and events to bytes; none of the structs here knows HTTP or an API.

Invariant: the events of a choice, joined, are its whole answer. How the output was cut into events says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from octavo.api_server.conversation.messages import Message
from octavo.api_server.conversation.tools import ToolUse
from octavo.api_server.generation.parsing import Reading
from octavo.api_server.parsers.base import ToolCall
from octavo.protocol.engine_messages import AddRequest, EarlyStopping
from octavo.protocol.sampling_params import NO_LOGPROBS, SamplingParams

TemplateOption = bool | int | float | str


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that the model's chat template makes of messages.

    Attributes:
        continues_final_message: the output goes on with the text of the last message, which is the assistant's.
        tool_use: what the model is shown and may call.
        template_options: names and values for the template, beyond messages and tools.
    """

    messages: tuple[Message, ...]
    adds_generation_prompt: bool = True
    continues_final_message: bool = False
    tool_use: ToolUse = ToolUse()
    template_options: Mapping[str, TemplateOption] = {}


Prompts = tuple[str | list[int], ...]


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says about how tokens are chosen and when that ends; None where it says nothing.

    Meanings are those of `SamplingParams`, but: `seed` -1 asks for any, `top_k` -1 for all, and `max_tokens` 0 for the
    prompt alone.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None


class BeamFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says about a beam search; `num_beams` None is n."""

    num_beams: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """How the answer is given; the engine core never sees it.

    Attributes:
        echo: each answer begins with the text of its prompt.
        num_logprobs: alternatives that are listed for each output token; 0 gives the token's own logprob only,
            NO_LOGPROBS none. With `echo`, the same for each prompt token.
        num_prompt_logprobs: likewise for the prompt, reported apart from the text.
        logs_silent_tokens: output tokens without text, such as EOS, have an entry among the logprobs too.
        returns_token_ids: events carry the ids of the output tokens.
        include_stop_string: the stop string that ended a text is the end of the text.
    """

    is_streamed: bool = False
    echo: bool = False
    num_logprobs: int = NO_LOGPROBS
    num_prompt_logprobs: int = NO_LOGPROBS
    logs_silent_tokens: bool = False
    returns_token_ids: bool = False
    skip_special_tokens: bool = True
    include_stop_string: bool = False


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """What a body asks for, before the limits and the tokenizer were asked.

    Attributes:
        default_max_tokens: of the route, when neither the client nor the model says how long an answer may be.
        truncate_prompt_tokens: keep only so many of the prompt's last tokens; -1: as many as `max_tokens` leaves room.
        param_names: our names of fields -> the route's, for errors; a name that is missing is the same.
    """

    model: str
    prompts: Prompts | Conversation
    sampling: SamplingFields = SamplingFields()
    rendering: Rendering = Rendering()
    stop: tuple[str, ...] = ()
    n: int = 1
    beam_search: BeamFields | None = None
    priority: int = 0
    cache_salt: str = ""
    add_special_tokens: bool = True
    default_max_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    param_names: Mapping[str, str] = {}

    def param(self, name: str) -> str:
        """Return what the client calls our field `name`."""
        return self.param_names.get(name, name)

    @property
    def num_prompts(self) -> int:
        return 1 if isinstance(self.prompts, Conversation) else len(self.prompts)

    @property
    def num_choices(self) -> int:
        """How many outputs are computed for each prompt: choices, or the beams of a search."""
        num_beams = None if self.beam_search is None else self.beam_search.num_beams
        return self.n if num_beams is None else num_beams


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one client asks of the engine core, all checked.

    Attributes:
        requests: choice j of prompt i is number i × n + j; of a beam search, prompt i is number i.
        n: choices that are answered for each prompt.
        echoed: text of each prompt, with which its answers begin; empty when they do not.
        drops_output: the client wants the prompt only; the one token that the engine core must compute is dropped.
        reading: how thoughts and calls are told from content; None where all text is content.
    """

    requests: list[AddRequest]
    n: int
    is_beam_search: bool
    stop: tuple[str, ...]
    rendering: Rendering
    echoed: tuple[str, ...] = ()
    drops_output: bool = False
    reading: Reading | None = None

    @property
    def num_requests_per_prompt(self) -> int:
        return 1 if self.is_beam_search else self.n

    @property
    def num_prompts(self) -> int:
        return len(self.requests) // self.num_requests_per_prompt

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.n

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the engine core reports logprobs of the prompts; the first choice of each prompt asks for them."""
        return self.requests[0].sampling_params.num_prompt_logprobs != NO_LOGPROBS

    def prompt_token_ids(self, prompt_index: int) -> list[int]:
        return self.requests[prompt_index * self.num_requests_per_prompt].prompt_token_ids

    def sampling_params(self, prompt_index: int) -> SamplingParams:
        """Return the parameters of the first choice of a prompt."""
        return self.requests[prompt_index * self.num_requests_per_prompt].sampling_params

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt, however many choices it has."""
        return [len(self.prompt_token_ids(index)) for index in range(self.num_prompts)]


class TokenScore(NamedTuple):
    """A token, the exact bytes of its text in its place, and its logprob (None: it has none, being the first)."""

    token_id: int
    text: bytes
    logprob: float | None


class TokenEntry(NamedTuple):
    """The logprobs of one place in the text.

    Attributes:
        own: the token that stands there.
        likeliest: the likeliest tokens of that place, likeliest first.
        offset: characters of the answer, an echoed prompt included, before the one in which the token begins.
    """

    own: TokenScore
    likeliest: tuple[TokenScore, ...]
    offset: int


class Ending(NamedTuple):
    """How a choice ended.

    Attributes:
        finish_reason: `stop`, `length` or `tool_calls`.
        stop_reason: the stop string or the id of the client's stop token; None for EOS and other ends.
    """

    finish_reason: str
    stop_reason: str | int | None = None


class OutputEvent(msgspec.Struct, frozen=True, gc=False):
    """More of choice `index`: text of one kind, or complete calls, and what goes with it.

    Attributes:
        token_ids: new output tokens, when asked for; they do not wait for their text.
        logprobs: entries of tokens whose text begins in what came so far.
        ending: in the last event of the choice.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenEntry, ...] = ()
    ending: Ending | None = None

    @property
    def has_output(self) -> bool:
        """Whether there is anything besides the ending."""
        return bool(self.content or self.reasoning or self.tool_calls or self.token_ids or self.logprobs)

    @property
    def is_plain(self) -> bool:
        """Whether there is content and nothing else."""
        return self.ending is None and not (self.token_ids or self.logprobs or self.reasoning or self.tool_calls)


class WholeChoice(msgspec.Struct, frozen=True):
    """A choice that has ended: its events, for answers that have an order, and what they come to, for the others."""

    index: int
    events: Sequence[OutputEvent]

    @property
    def content(self) -> str:
        return "".join([event.content for event in self.events])

    @property
    def reasoning(self) -> str:
        return "".join([event.reasoning for event in self.events])

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple([call for event in self.events for call in event.tool_calls])

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple([token_id for event in self.events for token_id in event.token_ids])

    @property
    def logprobs(self) -> tuple[TokenEntry, ...]:
        return tuple([entry for event in self.events for entry in event.logprobs])

    @property
    def ending(self) -> Ending:
        return cast("Ending", self.events[-1].ending)


class Counts(NamedTuple):
    """Tokens of a run so far. A prompt counts once, however many choices it has.

    Attributes:
        num_cached_tokens: prompt tokens whose KV was there when the request was first admitted.
        num_reasoning_tokens: output tokens that were thoughts; None when the text was not parsed.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens
