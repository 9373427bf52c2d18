"""A model without a network: it shows every mistake in scheduling and memory as a wrong token.

Each KV slot holds a 64-bit hash of (token, position, the slot before it, read through the block table). The next token
is a hash over all slots of the request, gathered through the block table as attention does. So one wrong block, stale
slot, lost token or wrong num_computed_tokens changes everything that follows; so do logprobs, which are made of the
same hashes. `OracleModel` executes SchedulerOutputs as a worker does; `expected_output` says what must come out, from
the prompt and the sampling params alone.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from octavo.protocol.engine_messages import FinishReason
from octavo.protocol.logprobs import NO_ENTRY, PromptLogprobs, TokenLogprobs
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import (
    NO_TOKEN,
    CachedRequest,
    Candidates,
    CopyKind,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
)

POISON = 0xDEAD_0BAD_DEAD_0BAD  # in slots that hold nothing valid
START = 0x5EED  # what the first token finds in the slot before it
BEAM_EOS_ODDS = 6  # among a beam's candidates it is more frequent, so that beams end
EOS_ODDS = 48  # the model's own choice is EOS about once in so many tokens

_pack_slot = struct.Struct("<QQQ").pack
_pack_draw = struct.Struct("<QQQQ").pack


class ContractError(AssertionError):
    """A step that no worker could execute."""


def _hash64(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def slot_value(token_id: int, position: int, previous: int) -> int:
    """What the KV slot of a token holds."""
    return _hash64(_pack_slot(token_id, position, previous))


def choose_token(
    context_hash: int, params: SamplingParams, output_index: int, vocab_size: int, eos_token_ids: Sequence[int]
) -> int:
    """The token at `output_index` after a context with this hash. Temperature 0 takes no notice of the seed."""
    draw = context_hash
    if not params.is_greedy:
        draw = _hash64(_pack_draw(context_hash, params.seed, params.choice_index, output_index))
    token_id = draw % vocab_size
    if eos_token_ids and (draw >> 40) % EOS_ODDS == 0:
        token_id = eos_token_ids[(draw >> 32) % len(eos_token_ids)]
    if output_index < params.min_tokens:
        masked = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        if not masked.issuperset(range(vocab_size)):
            while token_id in masked:
                token_id = (token_id + 1) % vocab_size
    return token_id


def choose_candidates(
    context_hash: int, params: SamplingParams, output_index: int, vocab_size: int, eos_token_ids: Sequence[int]
) -> Candidates:
    """The likeliest tokens after a context, all different; their logprobs fall by amounts that the context chooses."""
    masked = set()
    if output_index < params.min_tokens:
        masked = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    likely: dict[int, float] = {}
    logprob, draw = 0.0, context_hash
    for _ in range(min(params.num_candidates, vocab_size)):
        draw = _hash64(_pack_slot(draw, vocab_size, output_index))
        token_id = draw % vocab_size
        if eos_token_ids and (draw >> 40) % BEAM_EOS_ODDS == 0:
            token_id = eos_token_ids[(draw >> 32) % len(eos_token_ids)]
        while token_id in likely:
            token_id = (token_id + 1) % vocab_size
        logprob -= ((draw >> 16) % 65_521 + 1) / 65_536
        likely[token_id] = logprob
    allowed = {token_id: logprob for token_id, logprob in likely.items() if token_id not in masked}
    return Candidates(list(allowed), list(allowed.values()))


def logprobs_row(context_hash: int, token_id: int, num_listed: int, vocab_size: int) -> tuple[list[int], list[float]]:
    """A row of `TokenLogprobs`: a token's own entry and those of the likeliest, which the context chooses."""
    likely: dict[int, float] = {}
    draw = context_hash
    for _ in range(min(num_listed, vocab_size)):
        draw = _hash64(_pack_slot(draw, num_listed, vocab_size))
        listed_id = draw % vocab_size
        while listed_id in likely:
            listed_id = (listed_id + 1) % vocab_size
        likely[listed_id] = token_logprob(context_hash, listed_id)
    listed = sorted(likely, key=lambda listed_id: (-likely[listed_id], listed_id))
    num_missing = num_listed - len(listed)
    token_ids = [token_id, *listed, *[NO_ENTRY] * num_missing]
    return token_ids, [token_logprob(context_hash, token_id), *map(likely.get, listed), *[-math.inf] * num_missing]


def token_logprob(context_hash: int, token_id: int) -> float:
    return -(_hash64(_pack_slot(context_hash, token_id, 0)) % 2**20) / 2**16


def pack_rows(rows: Sequence[tuple[list[int], list[float]]], num_listed: int) -> TokenLogprobs:
    token_ids = [token_id for ids, _ in rows for token_id in ids]
    logprobs = [logprob for _, values in rows for logprob in values]
    return TokenLogprobs(num_listed, array("i", token_ids).tobytes(), array("f", logprobs).tobytes())


def expected_output(
    prompt_token_ids: Sequence[int],
    sampling_params: SamplingParams,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    max_model_len: int,
) -> tuple[list[int], FinishReason]:
    """The output of a request that fits, and why it ends."""
    context = blake2b(digest_size=8)
    value, position = START, 0
    output: list[int] = []

    def compute(token_id: int) -> None:
        nonlocal value, position
        value = slot_value(token_id, position, value)
        position += 1
        context.update(value.to_bytes(8, "little"))

    for token_id in prompt_token_ids:
        compute(token_id)
    stop_token_ids = {*sampling_params.stop_token_ids, *(() if sampling_params.ignore_eos else eos_token_ids)}
    while True:
        context_hash = int.from_bytes(context.digest(), "little")
        token_id = choose_token(context_hash, sampling_params, len(output), vocab_size, eos_token_ids)
        output.append(token_id)
        if token_id in stop_token_ids and len(output) > sampling_params.min_tokens:
            return output, FinishReason.STOP
        if len(output) == sampling_params.max_tokens or len(prompt_token_ids) + len(output) >= max_model_len:
            return output, FinishReason.LENGTH
        compute(token_id)


class Row:
    """What a worker keeps of one request."""

    def __init__(self, new: NewRequest) -> None:
        self.token_ids = [*new.prompt_token_ids, *new.output_token_ids]
        self.num_prompt_tokens = len(new.prompt_token_ids)
        self.sampling_params = new.sampling_params
        self.block_table = list(new.block_ids)
        self.num_computed_tokens = new.num_computed_tokens


class OracleModel:
    """KV memory of both tiers and rows of one worker."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_num_seqs: int,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_num_seqs = max_num_seqs
        self.slots = array("Q", [POISON]) * (num_blocks * block_size)
        self.host_slots = array("Q", [POISON]) * (num_host_blocks * block_size)
        self.checksums: dict[int, bytes] = {}  # host block -> its content when it was written
        self.rows: dict[str, Row] = {}
        self.steady: dict[str, Row] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; raise ContractError for one that makes no sense."""
        for request_id in step.dropped_request_ids:
            self._row(request_id)
            del self.rows[request_id]
            self.steady.pop(request_id, None)
        corrupt_block_ids = [copy[2] for copy in step.copies if not self._copy(*copy)]
        for new in step.new_requests:
            self._add(new)
        for cached in step.cached_requests:
            self._grow(cached)
        if len(self.rows) > self.max_num_seqs:
            raise ContractError(f"{len(self.rows)} rows, but at most {self.max_num_seqs} are allowed")
        self._change_steady(step)
        batch = dict.fromkeys(self.steady, 1)
        if batch.keys() & step.num_scheduled_tokens.keys():
            raise ContractError("a steady request is scheduled by name")
        return self._run(step.step_id, batch | step.num_scheduled_tokens, corrupt_block_ids)

    def _run(self, step_id: int, batch: dict[str, int], corrupt_block_ids: list[int]) -> ModelRunnerOutput:
        sampled_token_ids: list[int] = []
        candidates: dict[str, Candidates] = {}
        logprobs: dict[str, TokenLogprobs] = {}
        prompt_logprobs: dict[str, PromptLogprobs] = {}
        for request_id, num_tokens in batch.items():
            row = self._row(request_id)
            self._compute(row, num_tokens)
            found = self._prompt_logprobs(row, num_tokens)
            if found is not None:
                prompt_logprobs[request_id] = found
            if row.num_computed_tokens < len(row.token_ids):
                continue
            if row.sampling_params.num_candidates:
                candidates[request_id] = self._candidates(row)
                sampled_token_ids.append(NO_TOKEN)
            else:
                sampled_token_ids.append(self._sample(row))
                if row.sampling_params.num_logprobs >= 0:
                    logprobs[request_id] = self._logprobs(row)
        return ModelRunnerOutput(
            step_id, sampled_token_ids, {}, candidates, corrupt_block_ids, logprobs, prompt_logprobs
        )

    def _row(self, request_id: str) -> Row:
        if request_id not in self.rows:
            raise ContractError(f"{request_id} has no row")
        return self.rows[request_id]

    def _copy(self, kind: CopyKind, source: int, destination: int) -> bool:
        """Copy a block; False when it comes from the host and is not what went there."""
        sources = self.host_slots if kind is CopyKind.SWAP_IN else self.slots
        destinations = self.host_slots if kind is CopyKind.SWAP_OUT else self.slots
        size = self.block_size
        if not (0 <= source < len(sources) // size and 0 <= destination < len(destinations) // size):
            raise ContractError(f"{kind.name} from block {source} to block {destination}")
        content = sources[source * size : (source + 1) * size]
        destinations[destination * size : (destination + 1) * size] = content
        if kind is CopyKind.SWAP_OUT:
            self.checksums[destination] = content.tobytes()
        return kind is not CopyKind.SWAP_IN or self.checksums[source] == content.tobytes()

    def _add(self, new: NewRequest) -> None:
        if new.request_id in self.rows:
            raise ContractError(f"{new.request_id} has a row already")
        row = self.rows[new.request_id] = Row(new)
        self._poison(row.block_table[-(-row.num_computed_tokens // self.block_size) :])

    def _grow(self, cached: CachedRequest) -> None:
        self._poison(cached.new_block_ids)
        row = self._row(cached.request_id)
        row.block_table += cached.new_block_ids
        row.token_ids += cached.new_token_ids
        if cached.new_token_ids and not row.sampling_params.num_candidates:
            raise ContractError(f"{cached.request_id} samples its own tokens")

    def _change_steady(self, step: SchedulerOutput) -> None:
        for request_id in step.steady_left:
            if request_id not in self.steady or request_id not in self.rows:
                raise ContractError(f"{request_id} is not steady and cannot leave")
            del self.steady[request_id]
        for request_id in step.steady_joined:
            if request_id in self.steady:
                raise ContractError(f"{request_id} is steady already")
            self.steady[request_id] = self._row(request_id)

    def _poison(self, block_ids: Sequence[int]) -> None:
        poison = array("Q", [POISON]) * self.block_size
        for block_id in block_ids:
            self.slots[block_id * self.block_size : (block_id + 1) * self.block_size] = poison

    def _slot(self, row: Row, position: int) -> int:
        block_index, offset = divmod(position, self.block_size)
        if block_index >= len(row.block_table):
            raise ContractError(f"the block table does not cover position {position}")
        return row.block_table[block_index] * self.block_size + offset

    def _compute(self, row: Row, num_tokens: int) -> None:
        start, end = row.num_computed_tokens, row.num_computed_tokens + num_tokens
        if num_tokens < 1 or end > len(row.token_ids):
            raise ContractError(f"tokens {start} to {end} of {len(row.token_ids)} were scheduled")
        for position in range(start, end):
            previous = self.slots[self._slot(row, position - 1)] if position else START
            self.slots[self._slot(row, position)] = slot_value(row.token_ids[position], position, previous)
        row.num_computed_tokens = end

    def _context_hash(self, row: Row, num_tokens: int | None = None) -> int:
        """Gather the slots of all computed tokens, or of the first `num_tokens`, as attention does."""
        context = blake2b(digest_size=8)
        num_left = row.num_computed_tokens if num_tokens is None else num_tokens
        for block_id in row.block_table[: -(-num_left // self.block_size)]:
            start = block_id * self.block_size
            context.update(self.slots[start : start + min(self.block_size, num_left)].tobytes())
            num_left -= self.block_size
        return int.from_bytes(context.digest(), "little")

    def _sample(self, row: Row) -> int:
        """Choose the next token from the gathered context and append it to the row."""
        output_index = len(row.token_ids) - row.num_prompt_tokens
        token_id = choose_token(
            self._context_hash(row), row.sampling_params, output_index, self.vocab_size, self.eos_token_ids
        )
        row.token_ids.append(token_id)
        return token_id

    def _candidates(self, row: Row) -> Candidates:
        output_index = len(row.token_ids) - row.num_prompt_tokens
        return choose_candidates(
            self._context_hash(row), row.sampling_params, output_index, self.vocab_size, self.eos_token_ids
        )

    def _logprobs(self, row: Row) -> TokenLogprobs:
        """What there is to say of the token that was sampled just now."""
        num_listed = row.sampling_params.num_logprobs
        found = logprobs_row(self._context_hash(row), row.token_ids[-1], num_listed, self.vocab_size)
        return pack_rows([found], num_listed)

    def _prompt_logprobs(self, row: Row, num_tokens: int) -> PromptLogprobs | None:
        """What the last `num_tokens` computed tokens say of the prompt tokens behind them."""
        num_listed = row.sampling_params.num_prompt_logprobs
        end = row.num_computed_tokens
        positions = range(end - num_tokens + 1, min(end + 1, row.num_prompt_tokens))
        if num_listed < 0 or not positions:
            return None
        rows = [
            logprobs_row(self._context_hash(row, position), row.token_ids[position], num_listed, self.vocab_size)
            for position in positions
        ]
        return PromptLogprobs(positions[0], pack_rows(rows, num_listed))
