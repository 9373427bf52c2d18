"""Drives a ModelRunner with hand-written steps: the smallest engine core that tests can steer token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import CachedRequest, ModelRunnerOutput, NewRequest, SchedulerOutput
from octavo.worker.model_runner import ModelRunner


@dataclass
class DrivenRequest:
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    has_row: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class StepDriver:
    """Requests by id; blocks are handed out in random order, so that no table is a run of neighbours."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = runner.block_size
        self.free_blocks = list(range(runner.kv_cache.shape[2]))
        random.Random(seed).shuffle(self.free_blocks)
        self.requests: dict[str, DrivenRequest] = {}
        self.dropped: list[str] = []
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

    def step(self, **num_tokens: int) -> ModelRunnerOutput:
        """Run one step of so many tokens per request."""
        new, cached = [], []
        for request_id, count in num_tokens.items():
            request = self.requests[request_id]
            blocks = self._take_blocks(request, request.num_computed + count)
            if request.has_row:
                cached.append(CachedRequest(request_id, blocks))
            else:
                new.append(self._new_request(request_id, request))
            request.has_row = True
        output = self.runner.execute(SchedulerOutput(self.step_id, self.dropped, [], [], new, cached, dict(num_tokens)))
        self._update(output, num_tokens)
        return output

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
        assert output.step_id == self.step_id
        self.step_id += 1
        self.dropped = []
        for request_id, count in num_tokens.items():
            request = self.requests[request_id]
            request.num_computed += count
            reaches_end = request.num_computed == request.num_tokens
            request.output += output.sampled_token_ids.get(request_id, [])
            assert (request_id in output.sampled_token_ids) == (reaches_end and request_id not in output.errors)

    def run_until(self, num_tokens: int, chunk: int) -> dict[str, list[int]]:
        """Step all requests, each at most `chunk` tokens at a time, until each has so many output tokens."""
        while pending := {
            request_id: min(chunk, request.num_tokens - request.num_computed)
            for request_id, request in self.requests.items()
            if len(request.output) < num_tokens
        }:
            self.step(**pending)
        return {request_id: request.output for request_id, request in self.requests.items()}
