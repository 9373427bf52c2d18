"""Drives a ModelRunner with hand-written steps: the smallest engine core that tests can steer token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import (
    NO_TOKEN,
    BlockCopy,
    CachedRequest,
    CopyKind,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
)
from octavo.worker.block_copies import BlockCopier, Tier
from octavo.worker.cpu_device import CPU_DEVICE
from octavo.worker.device import Device
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler


def poisoned_runner(
    model: LlamaForCausalLM,
    sampler: Sampler,
    states: RequestStates,
    block_size: int,
    num_blocks: int,
    num_host_blocks: int = 0,
    check_swapped_blocks: bool = False,
    device: Device = CPU_DEVICE,
    dtype: torch.dtype = torch.float32,
) -> ModelRunner:
    """A runner whose KV memory is full of NaN: what was never written must never count."""
    sizes = model.kv_shape
    device_cache, host_cache = (
        torch.full((sizes.num_layers, 2, number, block_size, sizes.num_kv_heads, sizes.head_dim), torch.nan).to(dtype)
        for number in (num_blocks, num_host_blocks)
    )
    copier = BlockCopier(device_cache, host_cache, check_swapped_blocks)
    return ModelRunner(model, device_cache, sampler, states, copier, device)


@dataclass
class DrivenRequest:
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    has_row: bool = False
    new_token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class StepDriver:
    """Requests by id; blocks are handed out in random order, so that no table is a run of neighbours.

    With `uses_steady`, requests that get the one token that they lack are made steady as soon as that is possible.
    """

    def __init__(self, runner: ModelRunner, seed: int = 0, uses_steady: bool = False) -> None:
        self.runner = runner
        self.uses_steady = uses_steady
        self.block_size = runner.block_size
        self.free_blocks = list(range(runner.copier.num_blocks(Tier.DEVICE)))
        self.free_host_blocks = list(range(runner.copier.num_blocks(Tier.HOST)))
        random.Random(seed).shuffle(self.free_blocks)
        self.requests: dict[str, DrivenRequest] = {}
        self.swapped: dict[str, tuple[DrivenRequest, list[int]]] = {}
        self.steady: list[str] = []
        self.dropped: list[str] = []
        self.copies: list[BlockCopy] = []
        self.sampled: dict[str, int] = {}  # by the last step, NO_TOKEN included
        self.step_id = 0

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 200, **params: float) -> None:
        self.requests[request_id] = DrivenRequest(
            list(prompt), SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params})
        )

    def drop(self, request_id: str) -> DrivenRequest:
        """Forget a request: its blocks are free for others at the next step."""
        request = self.requests.pop(request_id)
        self.free_blocks = request.blocks + self.free_blocks
        self.dropped.append(request_id)
        return request

    def preempt(self, request_id: str) -> None:
        """Drop a request and queue it again with its output so far."""
        request = self.drop(request_id)
        self.requests[request_id] = DrivenRequest(request.prompt, request.params, request.output)

    def swap_out(self, request_id: str) -> list[int]:
        """Drop a request whose blocks go to the host at the next step; return the host blocks."""
        request = self.drop(request_id)
        host_blocks = [self.free_host_blocks.pop() for _ in request.blocks]
        self.copies += [(CopyKind.SWAP_OUT, *pair) for pair in zip(request.blocks, host_blocks, strict=True)]
        self.swapped[request_id] = (request, host_blocks)
        return host_blocks

    def swap_in(self, request_id: str) -> list[int]:
        """Let a swapped request go on in other blocks from the next step on; return them."""
        request, host_blocks = self.swapped.pop(request_id)
        blocks = [self.free_blocks.pop() for _ in host_blocks]
        self.copies += [(CopyKind.SWAP_IN, *pair) for pair in zip(host_blocks, blocks, strict=True)]
        self.free_host_blocks += host_blocks
        resumed = DrivenRequest(request.prompt, request.params, request.output, list(blocks), request.num_computed)
        self.requests[request_id] = resumed
        return blocks

    def choose(self, request_id: str, token_id: int) -> None:
        """Append a token to a request that reports candidates."""
        self.requests[request_id].output.append(token_id)
        self.requests[request_id].new_token_ids.append(token_id)

    def step(self, **num_tokens: int) -> ModelRunnerOutput:
        """Run one step of so many tokens per request."""
        steady = [name for name in self.steady if name in num_tokens and name not in self.dropped]
        left = [name for name in self.steady if name not in steady and name not in self.dropped]
        joined = [name for name, count in num_tokens.items() if name not in steady and self._can_be_steady(name, count)]
        self.steady = steady + joined
        named = {name: count for name, count in num_tokens.items() if name not in self.steady}
        new, cached = self._deltas(num_tokens)
        step = SchedulerOutput(self.step_id, self.dropped, self.copies, new, cached, left, joined, named)
        output = self.runner.execute(step)
        self._update(output, {name: num_tokens[name] for name in [*self.steady, *named]})
        return output

    def _can_be_steady(self, request_id: str, count: int) -> bool:
        request = self.requests[request_id]
        lacks_one = count == request.num_tokens - request.num_computed == 1
        return self.uses_steady and lacks_one and not request.params.num_candidates

    def _deltas(self, num_tokens: dict[str, int]) -> tuple[list[NewRequest], list[CachedRequest]]:
        new, cached = [], []
        for request_id, count in num_tokens.items():
            request = self.requests[request_id]
            blocks = self._take_blocks(request, request.num_computed + count)
            if not request.has_row:
                new.append(self._new_request(request_id, request))
            elif blocks or request.new_token_ids:
                cached.append(CachedRequest(request_id, blocks, request.new_token_ids))
            request.has_row, request.new_token_ids = True, []
        return new, cached

    def _take_blocks(self, request: DrivenRequest, num_tokens: int) -> list[int]:
        num_new = max(0, -(-num_tokens // self.block_size) - len(request.blocks))
        blocks = [self.free_blocks.pop() for _ in range(num_new)]
        request.blocks += blocks
        return blocks

    def _new_request(self, request_id: str, request: DrivenRequest) -> NewRequest:
        return NewRequest(
            request_id, request.prompt, list(request.output), request.params, list(request.blocks), request.num_computed
        )

    def _update(self, output: ModelRunnerOutput, num_tokens: dict[str, int]) -> None:
        """Match the results with the requests; `num_tokens` is in batch order."""
        assert output.step_id == self.step_id
        self.step_id += 1
        self.dropped, self.copies = [], []
        ended = []
        for request_id, count in num_tokens.items():
            request = self.requests[request_id]
            request.num_computed += count
            if request.num_computed == request.num_tokens:
                ended.append(request_id)
        self.sampled = dict(zip(ended, output.sampled_token_ids, strict=True))
        for request_id, token_id in self.sampled.items():
            has_token = request_id not in output.errors and request_id not in output.candidates
            assert (token_id != NO_TOKEN) == has_token
            self.requests[request_id].output += [token_id] if has_token else []

    def run_until(self, num_tokens: int, chunk: int) -> dict[str, list[int]]:
        """Step all requests, each at most `chunk` tokens at a time, until each has so many output tokens."""
        while pending := {
            request_id: min(chunk, request.num_tokens - request.num_computed)
            for request_id, request in self.requests.items()
            if len(request.output) < num_tokens
        }:
            self.step(**pending)
        return {request_id: request.output for request_id, request in self.requests.items()}
