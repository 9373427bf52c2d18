"""The masks of rows that follow a grammar, filled by the host while the device is busy with the forward pass.

A mask depends on the token before it. Where the host has that token, as it always has on a CPU, a thread fills the
masks from before the forward pass on; llguidance and the kernels both leave the interpreter alone. Where the step of
that token is still under way, the host waits for it once the forward pass is with the device. That is the one wait in
a launch: the device has the forward pass to do meanwhile, and steps without such rows never wait.

Invariant: a mask is a function of the request's options and output. A row's state is made by `assign` and is told all
output tokens, those from before a preemption or a restart among them, so there is nothing to restore.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from octavo.worker.device import Device, Event
from octavo.worker.grammar import Grammars, GrammarState
from octavo.worker.request_states import RequestStates
from octavo.worker.token_masks import TokenMasks


class _Follower(NamedTuple):
    """A row with a grammar; `allowed` is the mask of the tokens that it allows itself, None for all."""

    row: int
    state: GrammarState
    allowed: np.ndarray | None

    def fill(self, bits: np.ndarray) -> None:
        """Set int32 [ceil(vocab_size / 32)] to what may follow."""
        self.state.fill(bits)
        if self.allowed is not None:
            bits &= self.allowed


class _LastTokens(NamedTuple):
    """Each row's last token, int64 [num_rows] in host memory, with content when the device has come to `known`."""

    token_ids: torch.Tensor
    known: Event


class _Job(NamedTuple):
    """The masks of one step.

    Attributes:
        followers: whose.
        new_token_ids: output tokens that each of them was not told of; a negative one at the end is not known.
        last_tokens: where it will be; None when all are known.
        bits: int32 [len(followers), ceil(vocab_size / 32)] in host memory, to be filled.
    """

    followers: list[_Follower]
    new_token_ids: list[list[int]]
    last_tokens: _LastTokens | None
    bits: torch.Tensor

    def fill(self) -> None:
        """Do it, after waiting for the tokens that are not known."""
        last_ids = None
        if self.last_tokens is not None:
            self.last_tokens.known.synchronize()
            last_ids = self.last_tokens.token_ids.numpy()
        rows_of_bits = self.bits.numpy()
        for follower, token_ids, bits in zip(self.followers, self.new_token_ids, rows_of_bits, strict=True):
            if last_ids is not None and token_ids and token_ids[-1] < 0:
                token_ids[-1] = int(last_ids[follower.row])
            follower.state.accept(token_ids)
            follower.fill(bits)


class GrammarMasks:
    """Fills the rows of `masks` for requests with a grammar."""

    def __init__(self, masks: TokenMasks, grammars: Grammars, states: RequestStates, device: Device) -> None:
        self.masks = masks
        self.grammars = grammars
        self.states = states
        self.device = device
        self._followers: dict[int, _Follower] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._started: tuple[_Job, Future[None] | None] | None = None  # a job, and what the thread makes of it

    def assign(self, row: int) -> None:
        """Begin with the request of a row that was assigned."""
        self._followers.pop(row, None)
        if self.states.sampling.has_grammar[row]:
            self._followers[row] = self._follow(row)

    def start(self, drawn_rows: np.ndarray, last_token_ids: torch.Tensor) -> None:
        """Have the masks filled of those of `drawn_rows` that follow a grammar; `finish` has to come next.

        `last_token_ids` is int64 [num_rows] on the device, as the steps before this one leave it.
        """
        rows = drawn_rows[self.states.sampling.has_grammar[drawn_rows]].tolist()
        if not rows:
            return
        followers = [self._followers[row] for row in rows]
        new_token_ids = [self._output(each.row, start=each.state.num_tokens) for each in followers]
        last_tokens = None
        if any(token_ids and token_ids[-1] < 0 for token_ids in new_token_ids):
            last_tokens = _LastTokens(self.device.download(last_token_ids), self.device.record())
        bits = self.device.empty_host((len(rows), self.masks.num_words), torch.int32)
        job = _Job(followers, new_token_ids, last_tokens, bits)
        self._started = job, None if last_tokens else self._thread.submit(job.fill)

    def finish(self) -> None:
        """Bring the masks to the device, when they are filled."""
        if self._started is None:
            return
        (job, filling), self._started = self._started, None
        if filling is None:
            job.fill()
        else:
            filling.result()
        for follower, bits in zip(job.followers, job.bits, strict=True):
            self.masks.write(follower.row, bits)

    def has_failed(self, row: int, output_position: int) -> bool:
        """Return whether it was its grammar that left the row without a token at this place."""
        follower = self._followers.get(row)
        return follower is not None and follower.state.failed_at == output_position

    def allowed_at(self, row: int, output_position: int) -> np.ndarray | None:
        """Return the mask of the row at this place, as `RowEdits.bitmask`; None without a grammar."""
        if row not in self._followers:
            return None
        follower, bits = self._follow(row), np.zeros(self.masks.num_words, np.int32)
        follower.state.accept(self._output(row)[:output_position])
        follower.fill(bits)
        return bits

    def _follow(self, row: int) -> _Follower:
        table = self.states.sampling
        state = GrammarState(self.grammars, table.grammars[row], table.grammar_start_token_ids[row])
        allowed_ids = table.allowed_token_ids[row]
        return _Follower(row, state, self.masks.pack(allowed_ids) if allowed_ids else None)

    def _output(self, row: int, start: int = 0) -> list[int]:
        """Return the row's output from its token `start` on."""
        states = self.states
        return states.token_ids[row, states.num_prompt_tokens[row] + start : states.num_tokens[row]].tolist()
