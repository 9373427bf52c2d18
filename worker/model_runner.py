"""One step: apply what changed, run the model, sample or list candidates, remember the sampled tokens.

`launch` gives a step to the device and returns; `PendingStep.result` is what came of it. Between the two the next step
may be launched: each row's last token stays on the device, in `last_token_ids`, and the next step takes it from there.
Invariant: nothing in `launch` waits for the device, so that a step is there before the device is done with the one
before; a device that does everything at once just returns later from it. There are two exceptions: checksums of swapped
blocks, a debugging aid, and rows that follow a grammar, for which the step before has to end once the forward pass is
with the device (`grammar_masks`). Only rows that will be sampled, and those whose prompt logprobs are asked for, pass
through the head.

Of a captured graph there is the forward pass alone: it has most of the operations and needs no options, while what
follows it depends on who asks for what, and is given to the device while that is still busy with the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from octavo.kernels.ops.attention import (
    AttentionPlan,
    BlockTables,
    PlanCapacity,
    decode_plan_capacity,
    plan_attention,
)
from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.protocol.worker_messages import BlockCopy, CopyKind, ModelRunnerOutput, SchedulerOutput
from octavo.worker.block_copies import BlockCopier
from octavo.worker.cpu_device import CPU_DEVICE
from octavo.worker.device import Device
from octavo.worker.distributed import SINGLE_RANK, TensorParallelGroup
from octavo.worker.distributed_checksum import with_checksum
from octavo.worker.grammar import NO_GRAMMARS, Grammars
from octavo.worker.graph import NO_GRAPHS, StepGraphs, capture_graphs, graph_sizes
from octavo.worker.input_batch import InputBatch, make_input_batch
from octavo.worker.logits_edits import LogitsEdits
from octavo.worker.logprobs import RowLogprobs
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.prompt_logprobs import find_logprobs, find_prompt_tokens
from octavo.worker.recorded_steps import RecordedSteps, StepSizes, record_steps
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler
from octavo.worker.step_inputs import (
    MASKED_CANDIDATES,
    Choices,
    attention_metadata,
    choice_arrays,
    forward_arrays,
    make_choices,
    plan_num_bytes,
    resolve_token_ids,
    step_num_bytes,
)
from octavo.worker.step_result import ChosenTokens, Downloads, PendingStep
from octavo.worker.token_draw import draw_tokens

Tensors = dict[str, torch.Tensor]


class ModelRunner:
    """Executes steps on one device, strictly one after the other."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: torch.Tensor,
        sampler: Sampler,
        states: RequestStates,
        copier: BlockCopier,
        device: Device = CPU_DEVICE,
        group: TensorParallelGroup = SINGLE_RANK,
        max_num_batched_tokens: int = 0,
        grammars: Grammars = NO_GRAMMARS,
    ) -> None:
        """`kv_cache`, the device tier of `copier`: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].

        `max_num_batched_tokens` is the most that a step usually computes: what is more goes to the device by itself.
        """
        self.model = model
        self.kv_cache = kv_cache
        self.block_size = kv_cache.shape[3]
        self.sampler = sampler
        self.states = states
        self.copier = copier
        self.device = device
        self.group = group
        plan_bytes = plan_num_bytes(self.plan_capacity(states.num_requests))
        self.uploader = device.make_uploader(step_num_bytes(states, max_num_batched_tokens) + plan_bytes)
        self.edits = LogitsEdits(states, sampler, device, grammars) if group.rank == 0 else None
        self.last_token_ids = torch.zeros(states.num_rows, dtype=torch.int64, device=device.torch_device)
        self.graphs: StepGraphs | RecordedSteps = NO_GRAPHS
        self.max_num_batched_tokens = max_num_batched_tokens

    def plan_capacity(self, num_requests: int) -> PlanCapacity:
        """Return how large the plan of a step of one token for each of `num_requests` requests can be."""
        num_slots = self.kv_cache.shape[2] * self.block_size
        return decode_plan_capacity(num_requests, self.states.token_ids.shape[1], self.model.heads, num_slots)

    def capture_graphs(self) -> None:
        """Capture the graphs of decode steps; what they read and write stays at its place from then on."""
        sizes = graph_sizes(self.states.num_requests)
        max_blocks = self.states.block_tables.shape[1]
        self.graphs = capture_graphs(self.device, self.uploader, self.forward, sizes, max_blocks, self.plan_capacity)

    def record_steps(self) -> str:
        """Record the forward pass of every step that fits the limits; return what to say about it."""
        num_requests, max_blocks = self.states.block_tables.shape[0], self.states.block_tables.shape[1]
        num_tokens = max(self.max_num_batched_tokens, num_requests)
        plan = self.plan_capacity(self.states.num_requests)
        plan = plan._replace(num_work=plan.num_work + num_tokens)  # a row of work has at least one token
        sizes = StepSizes(num_tokens, num_requests, max_blocks, plan)
        forward = partial(self.forward, has_unknown_tokens=False)
        self.graphs, detail = record_steps(forward, sizes, self.last_token_ids)
        return detail

    def forward(self, tensors: Tensors, plan: AttentionPlan | None, has_unknown_tokens: bool = True) -> torch.Tensor:
        """Run the model on uploaded arrays, some of whose tokens only the device may know; return [T, hidden_size]."""
        token_ids = tensors["token_ids"]
        if has_unknown_tokens:
            token_ids = resolve_token_ids(token_ids, self.last_token_ids)
        return self.model(token_ids, tensors["positions"], self.kv_cache, attention_metadata(tensors, plan))

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run `step` and return what was sampled; see `launch`."""
        return self.launch(step).result()

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput, checksum: int = 0) -> PendingStep:
        """Give `step` to the device.

        `checksum` is that of the steps so far; all ranks of a group must have the same.

        Raises KeyError or ValueError when the step does not fit the rows that earlier steps made; then the state of
        the two processes has parted, and the worker has to be started anew.
        """
        corrupt_block_ids = self._apply(step)
        batch = make_input_batch(self.states, step.num_scheduled_tokens, self.block_size)
        chosen = None if batch is None else self._compute(batch, checksum)
        self.states.begin_step()
        done = self.device.record()
        return PendingStep(step.step_id, self.states, self.edits, self.group, corrupt_block_ids, chosen, done)

    def _apply(self, step: SchedulerOutput) -> list[int]:
        """Apply the changes in the order of the fields; return the corrupt blocks."""
        for request_id in step.dropped_request_ids:
            self.states.drop(request_id)
        corrupt_block_ids = self._corrupt_on_any_rank(step.copies, self.copier.apply(step.copies))
        for request in step.new_requests:
            row = self.states.assign(request)
            if self.edits is not None:
                self.edits.assign(row)
        for cached in step.cached_requests:
            self.states.grow(cached)
        self.states.update_steady(step.steady_left, step.steady_joined)
        return corrupt_block_ids

    def _corrupt_on_any_rank(self, copies: Sequence[BlockCopy], corrupt_block_ids: list[int]) -> list[int]:
        """Return the blocks that came back wrong on this rank or on another; all ranks give them up alike."""
        if not self.copier.check_swapped_blocks:
            return corrupt_block_ids
        came_back = sorted({destination for kind, _, destination in copies if kind is CopyKind.SWAP_IN})
        if not came_back:
            return corrupt_block_ids
        is_corrupt = [float(block_id in corrupt_block_ids) for block_id in came_back]
        num_ranks = self.group.all_reduce(torch.tensor(is_corrupt, device=self.last_token_ids.device)).tolist()
        return [block_id for block_id, num in zip(came_back, num_ranks, strict=True) if num]

    def _compute(self, batch: InputBatch, checksum: int) -> ChosenTokens:
        """Run the model and choose tokens."""
        choices = make_choices(self.states, batch)
        prompt_tokens = find_prompt_tokens(self.states, batch)
        tables = BlockTables(batch.block_tables, self.block_size)
        query_lens = batch.num_scheduled_tokens.astype(np.int32)
        plan = plan_attention(query_lens, batch.seq_lens, self.model.heads, tables=tables)
        graph = self.graphs.find(batch, plan)
        arrays = forward_arrays(batch, plan) if graph is None else graph.arrays(batch, plan)
        arrays |= choice_arrays(self.states, self.sampler, self.edits, choices)
        if prompt_tokens is not None:
            arrays |= prompt_tokens.arrays()
        if self.edits is not None:
            self.edits.grammar_masks.start(choices.rows[choices.drawn], self.last_token_ids)
        tensors = self.uploader.upload(arrays)
        self.copier.let_writes_follow_copies(batch.slot_mapping // self.block_size)
        if graph is None:
            hidden = self.forward(tensors, plan, has_unknown_tokens=bool(batch.token_ids.min() < 0))
        else:
            hidden = graph.run(tensors)
        self.states.num_computed_tokens[batch.rows] += batch.num_scheduled_tokens
        downloads = self._choose(hidden, choices, tensors, checksum)
        if prompt_tokens is not None:
            found = find_logprobs(self.model.compute_logits, hidden, tensors, prompt_tokens.num_listed)
            downloads = downloads._replace(prompt_logprobs=self._download_logprobs(found))
        positions = self.states.expect_tokens(choices.rows[choices.drawn])
        return ChosenTokens(choices, positions, prompt_tokens, downloads, checksum)

    def _choose(self, hidden: torch.Tensor, choices: Choices, tensors: Tensors, checksum: int) -> Downloads:
        """Draw tokens and list candidates on the device, and have them brought to the host."""
        num_drawn, candidates, logits = len(choices.drawn), None, None
        if len(choices.rows):
            logits = self.model.compute_logits(hidden[tensors["chosen_tokens"]])
        if logits is not None and len(choices.listed):
            num = int(self.states.sampling.num_candidates[choices.rows[choices.listed]].max())
            lists = likeliest_tokens(logits[num_drawn:], num, tensors.get(MASKED_CANDIDATES))
            candidates = (self.device.download(lists[0]), self.device.download(lists[1]))
        token_ids, logprobs = self._draw(logits, choices, tensors)
        if self.group.size > 1:
            token_ids = self.group.broadcast(with_checksum(token_ids, checksum))
        if num_drawn:
            self.last_token_ids.index_copy_(0, tensors["drawn_rows"], token_ids[:num_drawn].clamp(min=0))
        return Downloads(self.device.download(token_ids), candidates, logprobs)

    def _draw(
        self, logits: torch.Tensor | None, choices: Choices, tensors: Tensors
    ) -> tuple[torch.Tensor, RowLogprobs | None]:
        """Return int64 [D] on the device, and the logprobs that are asked for, on their way to the host.

        What rank 0 will say is not known on the others, which have no logits.
        """
        num_drawn = len(choices.drawn)
        if logits is None or self.edits is None or not num_drawn:
            return self.last_token_ids.new_empty(num_drawn), None
        num_listed = 0
        if len(choices.reporting):
            num_listed = int(self.states.sampling.num_logprobs[choices.rows[choices.drawn]].max())
        drawn = draw_tokens(logits[:num_drawn], tensors, num_listed, self.last_token_ids, self.sampler, self.edits)
        return drawn[0], self._download_logprobs(drawn[1])

    def _download_logprobs(self, found: RowLogprobs | None) -> RowLogprobs | None:
        if found is None:
            return None
        return RowLogprobs(*(None if part is None else self.device.download(part) for part in found))
