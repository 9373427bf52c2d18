"""One step: apply what changed, run the model, sample, remember the sampled tokens.

Only rows that will be sampled pass through the output head. A request whose logits are not a distribution (NaN, or
nothing finite) fails alone: it gets no token, its row takes part in no further step, its neighbours never see it.
"""

from __future__ import annotations

import torch

from octavo.protocol.engine_messages import ErrorCode
from octavo.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput
from octavo.worker.input_batch import InputBatch, make_input_batch
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler, SamplingRow


class ModelRunner:
    """Executes steps on one device, strictly one after the other."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: torch.Tensor,
        sampler: Sampler,
        states: RequestStates,
    ) -> None:
        """`kv_cache` is [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]."""
        self.model = model
        self.kv_cache = kv_cache
        self.block_size = kv_cache.shape[3]
        self.sampler = sampler
        self.states = states

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run `step` and return what was sampled.

        Raises KeyError or ValueError when the step does not fit the rows that earlier steps made; then the state of
        the two processes has parted, and the worker has to be started anew.
        """
        self._apply(step)
        batch = make_input_batch(self.states, step.num_scheduled_tokens, self.block_size, self.kv_cache.device)
        if batch is None:
            return ModelRunnerOutput(step.step_id, {})
        hidden = self.model(batch.token_ids, batch.positions, self.kv_cache, batch.metadata)
        self.states.num_computed_tokens[batch.rows] += batch.num_scheduled_tokens
        if len(batch.sampled_requests) == 0:
            return ModelRunnerOutput(step.step_id, {})
        return self._sample(step.step_id, hidden, batch)

    def _apply(self, step: SchedulerOutput) -> None:
        for request_id in step.dropped_request_ids:
            self.states.drop(request_id)
        if step.swap_out or step.swap_in:
            raise ValueError("the step swaps blocks, but this worker reported no host blocks")
        for request in step.new_requests:
            self.states.assign(request)
        for cached in step.cached_requests:
            self.states.append_blocks(cached.request_id, cached.new_block_ids)

    def _sample(self, step_id: int, hidden: torch.Tensor, batch: InputBatch) -> ModelRunnerOutput:
        states, rows = self.states, batch.rows[batch.sampled_requests]
        positions = states.num_tokens[rows] - states.num_prompt_tokens[rows]
        sampling_rows = [
            SamplingRow(states.sampling_params[row], position)
            for row, position in zip(rows.tolist(), positions.tolist(), strict=True)
        ]
        logits = self.model.compute_logits(hidden[batch.sampled_tokens])
        result = self.sampler.sample(logits, self.sampler.prepare(sampling_rows))
        token_ids, is_invalid = result.token_ids.cpu().numpy(), result.is_invalid.cpu().numpy()
        states.append_tokens(rows[~is_invalid], token_ids[~is_invalid])
        states.has_failed[rows[is_invalid]] = True
        return _output(step_id, batch, token_ids.tolist(), is_invalid.tolist())


def _output(step_id: int, batch: InputBatch, token_ids: list[int], is_invalid: list[bool]) -> ModelRunnerOutput:
    names = [batch.request_ids[index] for index in batch.sampled_requests]
    sampled = zip(names, token_ids, is_invalid, strict=True)
    return ModelRunnerOutput(
        step_id,
        {name: [token_id] for name, token_id, is_bad in sampled if not is_bad},
        {name: ErrorCode.NUMERICAL_ERROR for name, is_bad in zip(names, is_invalid, strict=True) if is_bad},
    )
