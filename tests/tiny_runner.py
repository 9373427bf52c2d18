"""Runners of the tiny model, the prompts that they get, and steps written by hand."""

from __future__ import annotations

import random

import tiny_llama
import torch
from step_driver import poisoned_runner

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.worker_messages import ModelRunnerOutput, NewRequest, SchedulerOutput
from octavo.worker.model_runner import ModelRunner
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler

CPU = torch.device("cpu")
MAX_NUM_SEQS = 16
NUM_OUTPUT = 12
VOCAB_SIZE = tiny_llama.SIZES["vocab_size"]


class RecordingSampler(Sampler):
    """Keeps a copy of the logits of the last step; spoils the row that it is told to, once."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, ())
        self.logits: torch.Tensor | None = None
        self.row_to_spoil: int | None = None

    def sample(self, logits, batch):
        self.logits = logits.clone()
        if self.row_to_spoil is not None:
            logits[self.row_to_spoil, 3], self.row_to_spoil = torch.nan, None
        return super().sample(logits, batch)


def make_runner(
    model, block_size: int = 4, num_blocks: int = 600, num_host_blocks: int = 0, check: bool = False
) -> ModelRunner:
    states = RequestStates(MAX_NUM_SEQS, tiny_llama.MAX_MODEL_LEN, block_size)
    return poisoned_runner(model, RecordingSampler(), states, block_size, num_blocks, num_host_blocks, check)


def step_of(step_id: int = 0, **changes) -> SchedulerOutput:
    """A step in which nothing happens but `changes`."""
    nothing = {
        "dropped_request_ids": [],
        "copies": [],
        "new_requests": [],
        "cached_requests": [],
        "steady_left": [],
        "steady_joined": [],
        "num_scheduled_tokens": {},
    }
    return SchedulerOutput(step_id, **{**nothing, **changes})


def launch_ahead(
    runner: ModelRunner, num_steps: int, **requests: tuple[list[int], SamplingParams]
) -> list[ModelRunnerOutput]:
    """The results of steps that are each launched before that of the one before is read; prompts are in the first."""
    num_blocks = -(-(max(len(prompt) for prompt, _ in requests.values()) + num_steps) // runner.block_size)
    new = [
        NewRequest(name, prompt, [], params, list(range(index * num_blocks, (index + 1) * num_blocks)), 0)
        for index, (name, (prompt, params)) in enumerate(requests.items())
    ]
    num_tokens = {name: len(prompt) for name, (prompt, _) in requests.items()}
    pending = [runner.launch(step_of(0, new_requests=new, num_scheduled_tokens=num_tokens))]
    results = []
    for index in range(1, num_steps):
        pending.append(runner.launch(step_of(index, num_scheduled_tokens=dict.fromkeys(requests, 1))))
        results.append(pending.pop(0).result())
    return [*results, pending.pop().result()]


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(VOCAB_SIZE) for i in range(length)]


PROMPTS = {f"r{i}": prompt_of(3 + 7 * i, i) for i in range(MAX_NUM_SEQS)}
