"""One step: apply what changed, run the model, sample or list candidates, remember the sampled tokens.

Only rows that will be sampled pass through the output head. A request whose logits are not a distribution (NaN, or
nothing finite) fails alone: it gets no token, and its neighbours never see it. Its row goes on as if it had got one,
because the engine core may have sent the next step already and counts on it; so the results of both processes stay in
line without a word about the failure, and every later one of that row is NO_TOKEN.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.protocol.engine_messages import ErrorCode
from octavo.protocol.worker_messages import NO_TOKEN, Candidates, ModelRunnerOutput, SchedulerOutput
from octavo.worker.block_copies import BlockCopier
from octavo.worker.input_batch import InputBatch, make_input_batch
from octavo.worker.models.llama import LlamaForCausalLM
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import Sampler, SamplingRows


class ModelRunner:
    """Executes steps on one device, strictly one after the other."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        kv_cache: torch.Tensor,
        sampler: Sampler,
        states: RequestStates,
        copier: BlockCopier,
    ) -> None:
        """`kv_cache`, the device tier of `copier`: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]."""
        self.model = model
        self.kv_cache = kv_cache
        self.block_size = kv_cache.shape[3]
        self.sampler = sampler
        self.states = states
        self.copier = copier

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run `step` and return what was sampled.

        Raises KeyError or ValueError when the step does not fit the rows that earlier steps made; then the state of
        the two processes has parted, and the worker has to be started anew.
        """
        corrupt_block_ids = self._apply(step)
        batch = make_input_batch(self.states, step.num_scheduled_tokens, self.block_size, self.kv_cache.device)
        if batch is None:
            return ModelRunnerOutput(step.step_id, [], corrupt_block_ids=corrupt_block_ids)
        hidden = self.model(batch.token_ids, batch.positions, self.kv_cache, batch.metadata)
        self.states.num_computed_tokens[batch.rows] += batch.num_scheduled_tokens
        if len(batch.sampled_requests) == 0:
            return ModelRunnerOutput(step.step_id, [], corrupt_block_ids=corrupt_block_ids)
        token_ids, errors, candidates = self._choose(hidden, batch)
        return ModelRunnerOutput(step.step_id, token_ids.tolist(), errors, candidates, corrupt_block_ids)

    def _apply(self, step: SchedulerOutput) -> list[int]:
        """Apply the changes in the order of the fields; return the corrupt blocks."""
        for request_id in step.dropped_request_ids:
            self.states.drop(request_id)
        corrupt_block_ids = self.copier.apply(step.copies)
        for request in step.new_requests:
            self.states.assign(request)
        for cached in step.cached_requests:
            self.states.grow(cached)
        self.states.update_steady(step.steady_left, step.steady_joined)
        return corrupt_block_ids

    def _choose(
        self, hidden: torch.Tensor, batch: InputBatch
    ) -> tuple[np.ndarray, dict[str, ErrorCode], dict[str, Candidates]]:
        """Return int64 [S] token ids, who failed, and the candidates of those rows that do not sample."""
        rows = batch.rows[batch.sampled_requests]
        logits = self.model.compute_logits(hidden[batch.sampled_tokens])
        lists_candidates = self.states.sampling.num_candidates[rows] > 0
        if not lists_candidates.any():
            token_ids = self._sample(rows, logits)
            return token_ids, self._fail(rows[token_ids == NO_TOKEN]), {}
        drawn, listed = np.flatnonzero(~lists_candidates), np.flatnonzero(lists_candidates)
        token_ids = np.full(len(rows), NO_TOKEN)
        token_ids[drawn] = self._sample(rows[drawn], logits[torch.from_numpy(drawn)])
        candidates = self._list_candidates(rows[listed], logits[torch.from_numpy(listed)])
        has_result = token_ids != NO_TOKEN
        has_result[listed] = [self.states.request_ids[row] in candidates for row in rows[listed]]
        return token_ids, self._fail(rows[~has_result]), candidates

    def _sample(self, rows: np.ndarray, logits: torch.Tensor) -> np.ndarray:
        """Draw and append a token for each of `rows`; return int64 [len(rows)], NO_TOKEN for one that fails or has."""
        states = self.states
        result = self.sampler.sample(logits, self.sampler.prepare(self._sampling_rows(rows)))
        token_ids = result.token_ids.cpu().numpy()
        token_ids[result.is_invalid.cpu().numpy() | states.has_failed[rows]] = NO_TOKEN
        states.append_tokens(rows, np.maximum(token_ids, 0))  # any token will do for a row that has failed
        return token_ids

    def _list_candidates(self, rows: np.ndarray, logits: torch.Tensor) -> dict[str, Candidates]:
        """Return the candidates of each of `rows`, but for those that fail or have failed."""
        lists = self.sampler.list_candidates(logits, self._sampling_rows(rows))
        return {
            self.states.request_ids[row]: candidates
            for row, candidates in zip(rows.tolist(), lists, strict=True)
            if candidates.token_ids and not self.states.has_failed[row]
        }

    def _sampling_rows(self, rows: np.ndarray) -> SamplingRows:
        return SamplingRows(
            self.states.sampling, rows, self.states.num_tokens[rows] - self.states.num_prompt_tokens[rows]
        )

    def _fail(self, rows: np.ndarray) -> dict[str, ErrorCode]:
        """Mark rows as failed, and return those that had not failed before."""
        newly_failed = rows[~self.states.has_failed[rows]].tolist()
        self.states.has_failed[newly_failed] = True
        return {self.states.request_ids[row]: ErrorCode.NUMERICAL_ERROR for row in newly_failed}
