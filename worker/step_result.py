"""A step that was given to the device, and what comes of it when the device is done.

The result is read in the order of the steps. Only then does the host learn the tokens, writes them into the rows, and
sees who failed: a request whose logits are not a distribution (NaN, or nothing finite), be it because its own options
or its grammar left no token, fails alone, it gets no token, and its neighbours never see it. Its row goes on as if it
had got one, because the next step may have been started already and counts on it; so the results of both processes stay
in line without a word about the failure, and every later one of that row is NO_TOKEN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from octavo.protocol.engine_messages import ErrorCode
from octavo.protocol.logprobs import PromptLogprobs, TokenLogprobs
from octavo.protocol.worker_messages import NO_TOKEN, Candidates, ModelRunnerOutput
from octavo.worker.device import Event
from octavo.worker.distributed import TensorParallelGroup
from octavo.worker.distributed_checksum import require_same
from octavo.worker.logits_edits import LogitsEdits
from octavo.worker.logprobs import PackedRows, RowLogprobs
from octavo.worker.prompt_logprobs import PromptTokens, pack_prompt_logprobs
from octavo.worker.request_states import RequestStates
from octavo.worker.sampler import make_candidates
from octavo.worker.step_inputs import Choices


class Downloads(NamedTuple):
    """What comes back from the device, in host memory; it has content when the step is ready.

    Attributes:
        token_ids: int64 [D], and in a group of ranks the checksum of rank 0 behind them.
        candidates: int64 [L, num] and fp32 [L, num], what `likeliest_tokens` listed; None where there are none.
        logprobs: of the P drawn tokens whose requests asked; None where there are none.
        prompt_logprobs: of prompt tokens, as `find_logprobs` found them; None where there are none.
    """

    token_ids: torch.Tensor
    candidates: tuple[torch.Tensor, torch.Tensor] | None = None
    logprobs: RowLogprobs | None = None
    prompt_logprobs: RowLogprobs | None = None


class ChosenTokens(NamedTuple):
    """The tokens of a step that computed something.

    Attributes:
        choices: who gets one.
        positions: int64 [D], where the drawn ones belong in their rows.
        prompt_tokens: whose logprobs are reported; None when nobody asked.
        downloads: from the device.
        checksum: of all steps so far, this one's among them.
    """

    choices: Choices
    positions: np.ndarray
    prompt_tokens: PromptTokens | None
    downloads: Downloads
    checksum: int


class PendingStep:
    """A step under way; its result has to be read once, after those of the steps before it."""

    def __init__(
        self,
        step_id: int,
        states: RequestStates,
        edits: LogitsEdits | None,
        group: TensorParallelGroup,
        corrupt_block_ids: list[int],
        chosen: ChosenTokens | None,
        done: Event,
    ) -> None:
        """`edits` is None on the ranks that get no logits; `chosen` is None when nothing was computed.

        `done` is the end of the step on the device.
        """
        self.step_id = step_id
        self.states = states
        self.edits = edits
        self.group = group
        self.corrupt_block_ids = corrupt_block_ids
        self.chosen = chosen
        self.done = done

    def is_ready(self) -> bool:
        """Return whether `result` will not wait."""
        return self.done.query()

    def result(self) -> ModelRunnerOutput:
        """Wait for the step, and return what was sampled; raises RankDivergedError when ranks do different things."""
        self.done.synchronize()
        try:
            if self.chosen is None:
                return ModelRunnerOutput(self.step_id, [], corrupt_block_ids=self.corrupt_block_ids)
            return self._take(self.chosen)
        finally:
            self.states.end_step()

    def _take(self, chosen: ChosenTokens) -> ModelRunnerOutput:
        """Write the tokens down, and return them and what else the step found; see who fails."""
        choices, states = chosen.choices, self.states
        rows, token_ids = choices.rows, np.full(len(choices.rows), NO_TOKEN)
        drawn_ids = self._checked_token_ids(chosen)
        drawn_rows = rows[choices.drawn]
        drawn_ids[states.has_failed[drawn_rows]] = NO_TOKEN
        states.fill_tokens(drawn_rows, chosen.positions, np.maximum(drawn_ids, 0))  # any will do for one that failed
        token_ids[choices.drawn] = drawn_ids
        has_result = token_ids != NO_TOKEN
        candidates: dict[str, Candidates] = {}
        if len(choices.listed):
            candidates = self._candidates(rows[choices.listed], chosen.downloads)
            has_result[choices.listed] = [states.request_ids[row] in candidates for row in rows[choices.listed]]
        return ModelRunnerOutput(
            self.step_id,
            token_ids.tolist(),
            {} if has_result.all() else self._fail(rows[~has_result], choices.output_positions[~has_result]),
            candidates,
            self.corrupt_block_ids,
            self._logprobs(drawn_rows[choices.reporting], drawn_ids[choices.reporting], chosen.downloads),
            _prompt_logprobs(chosen),
        )

    def _checked_token_ids(self, chosen: ChosenTokens) -> np.ndarray:
        """Return int64 [D]."""
        token_ids = chosen.downloads.token_ids.numpy()
        if self.group.size == 1:
            return token_ids
        require_same(int(token_ids[-1]), chosen.checksum, self.group.rank)
        return token_ids[:-1]

    def _candidates(self, rows: np.ndarray, downloads: Downloads) -> dict[str, Candidates]:
        """Return the candidates of each of `rows`, but for those that fail or have failed; none on ranks above 0."""
        if downloads.candidates is None:
            return {}
        token_ids, logprobs = (tensor.numpy() for tensor in downloads.candidates)
        lists = make_candidates(token_ids, logprobs, self.states.sampling.num_candidates[rows].tolist())
        return {
            self.states.request_ids[row]: candidates
            for row, candidates in zip(rows.tolist(), lists, strict=True)
            if candidates.token_ids and not self.states.has_failed[row]
        }

    def _logprobs(self, rows: np.ndarray, token_ids: np.ndarray, downloads: Downloads) -> dict[str, TokenLogprobs]:
        """Return the logprobs of the `token_ids` that `rows` have got, but for those that have none."""
        if downloads.logprobs is None:
            return {}
        nums_listed = self.states.sampling.num_logprobs[rows]
        packed = PackedRows(token_ids, downloads.logprobs, int(nums_listed.max()))
        return {
            self.states.request_ids[row]: packed.pack(index, index + 1, num_listed)
            for index, (row, num_listed) in enumerate(zip(rows.tolist(), nums_listed.tolist(), strict=True))
            if token_ids[index] != NO_TOKEN
        }

    def _fail(self, rows: np.ndarray, output_positions: np.ndarray) -> dict[str, ErrorCode]:
        """Mark rows as failed, which got no token at these places; return those that had not failed before, and why."""
        is_new = ~self.states.has_failed[rows]
        self.states.has_failed[rows] = True
        return {
            self.states.request_ids[row]: self._why_failed(row, output_position)
            for row, output_position in zip(rows[is_new].tolist(), output_positions[is_new].tolist(), strict=True)
        }

    def _why_failed(self, row: int, output_position: int) -> ErrorCode:
        return ErrorCode.NUMERICAL_ERROR if self.edits is None else self.edits.why_no_token(row, output_position)


def _prompt_logprobs(chosen: ChosenTokens) -> dict[str, PromptLogprobs]:
    if chosen.prompt_tokens is None or chosen.downloads.prompt_logprobs is None:
        return {}
    return pack_prompt_logprobs(chosen.prompt_tokens, chosen.downloads.prompt_logprobs)
