"""The life of a worker after its start: steps come in frames, go to the device, and their results go back in order.

A step is given to the device as soon as its frame is there, also while the one before is still under way; the result of
the oldest is sent as soon as the device is done with it. The engine core sends a step when it has rank 0's result of
an earlier one; a rank that is behind catches up first, because the step counts on the rows that became free then.

While something is under way the loop looks for frames and results without pause, because a wait in the operating
system costs about as much as a small step; when nothing is, it takes memory for blocks to come, then waits for a frame.
A frame that is not a step is logged and dropped. Rejected: a thread that waits for the device (it would take the
interpreter from the one that launches).
"""

from __future__ import annotations

import logging
from collections import deque

from octavo.protocol.codec import decode_scheduler_output, encode
from octavo.protocol.transport import Receiver
from octavo.worker.distributed_checksum import StepChecksum
from octavo.worker.model_runner import ModelRunner
from octavo.worker.page_supply import PageSupply
from octavo.worker.step_result import PendingStep

logger = logging.getLogger(__name__)

IDLE_AFTER_S = 0.05  # without a step: longer than the gaps between the steps of a request


class StepLoop:
    """Serves the steps of one worker; of a group of ranks, rank 0 alone answers."""

    def __init__(
        self, runner: ModelRunner, link: Receiver, max_steps_in_flight: int, pages: PageSupply | None = None
    ) -> None:
        """`pages` are those of the KV cache, where it is in the memory of this machine."""
        self.runner = runner
        self.link = link
        self.max_steps_in_flight = max_steps_in_flight
        self.pages = pages
        self.is_idle = False
        self.checksum = StepChecksum()
        self.pending: deque[PendingStep] = deque()

    def turn(self) -> None:
        """Take one frame, if there is one or nothing is under way; then send what is ready.

        Raises RuntimeError when the engine core takes no results any more.
        """
        frame = self.link.receive(self._patience_s())
        if frame is not None:
            self.is_idle = False
            self._launch(frame)
        elif not self.pending and self.pages is not None:
            self.is_idle = True
            self.pages.add_some()
        while self.pending and self.pending[0].is_ready():
            self._finish(self.pending.popleft())

    def _patience_s(self) -> float | None:
        """Return how long to wait for a frame; None is until there is one."""
        if self.pending:
            return 0
        if self.pages is None or not self.pages.lacks_some:
            return None
        return 0 if self.is_idle else IDLE_AFTER_S

    def _launch(self, frame: bytes) -> None:
        try:
            step = decode_scheduler_output(frame)
        except ValueError:  # msgspec's errors and bad UTF-8 both are one
            logger.warning("dropped a frame of %d bytes that is not a step", len(frame))
            return
        while len(self.pending) >= self.max_steps_in_flight:
            self._finish(self.pending.popleft())
        self.checksum.update(frame)
        if self.pages is not None:
            self.pages.note(step)
        self.pending.append(self.runner.launch(step, self.checksum.value))

    def _finish(self, step: PendingStep) -> None:
        result = step.result()
        if self.runner.group.rank == 0 and not self.link.send(encode(result)):
            raise RuntimeError("the engine core takes no results")
