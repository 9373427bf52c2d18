"""What is written down while a simulation runs: one line per step, and the times of each request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class StepSample(NamedTuple):
    """One step and the KV memory while it ran.

    Attributes:
        num_token_slots: slots that hold a token's state.
        num_reserved_slots: slots that their request is going to fill.
        num_allocated_slots: those, the ones that will never be filled, and what the allocator rounded up.
        num_internal_slots: slots that a request got and will never fill (or, paged: has not filled in its last block).
    """

    end_s: float
    duration_s: float
    num_running: int
    num_waiting: int
    num_token_slots: int
    num_reserved_slots: int
    num_internal_slots: int
    num_allocated_slots: int


@dataclass
class Measurements:
    """Columns by step (the fields of StepSample), and latencies.

    Attributes:
        ttft_s: arrival to first token, by request in the order of first tokens.
        tpot_s: mean time per further token of each request that has any.
        itl_s: each time between two tokens of a request.
    """

    num_total_slots: int
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    itl_s: array[float] = field(default_factory=lambda: array("d"))
    makespan_s: float = 0.0  # until the last token of all
    num_finished: int = 0
    num_output_tokens: int = 0
    _samples: array[float] = field(default_factory=lambda: array("d"))
    _requests: dict[str, tuple[float, float]] = field(default_factory=dict)  # arrival or first token, last token

    def add_step(self, sample: StepSample) -> None:
        """Write one step down."""
        self._samples.extend(sample)

    def columns(self) -> dict[str, np.ndarray]:
        """The steps so far, a column per field of StepSample."""
        table = np.frombuffer(self._samples.tobytes()).reshape(-1, len(StepSample._fields))
        return {name: table[:, index] for index, name in enumerate(StepSample._fields)}

    def arrived(self, request_id: str, at_s: float) -> None:
        """A request came in."""
        self._requests[request_id] = (at_s, -1.0)

    def got_token(self, request_id: str, at_s: float) -> None:
        """A request's next token came out."""
        start_s, last_s = self._requests[request_id]
        if last_s < 0:
            self.ttft_s.append(at_s - start_s)
            start_s = at_s
        else:
            self.itl_s.append(at_s - last_s)
        self._requests[request_id] = (start_s, at_s)

    def finished(self, request_id: str, num_output_tokens: int) -> None:
        """The token before was the request's last."""
        first_s, last_s = self._requests.pop(request_id)
        self.makespan_s = last_s
        self.num_finished += 1
        self.num_output_tokens += num_output_tokens
        if num_output_tokens > 1:
            self.tpot_s.append((last_s - first_s) / (num_output_tokens - 1))
