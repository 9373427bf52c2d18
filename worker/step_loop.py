"""The life of a worker after its start: steps come in frames, go to the device, and their results go back in order.

A step is given to the device as soon as its frame is there, also while the one before is still under way; the result of
the oldest is sent as soon as the device is done with it. The engine core sends a step when it has rank 0's result of
an earlier one; a rank that is behind catches up first, because the step counts on the rows that became free then.

While something is under way the loop looks for frames and results without pause, because a wait in the operating
system costs about as much as a small step; when nothing is, it waits for a frame. A frame that is not a step is logged
and dropped. Rejected: a thread that waits for the device (it would take the interpreter from the one that launches).
"""

from __future__ import annotations

import logging
from collections import deque

from octavo.protocol.codec import decode_scheduler_output, encode
from octavo.protocol.transport import Receiver
from octavo.worker.distributed_checksum import StepChecksum
from octavo.worker.model_runner import ModelRunner
from octavo.worker.step_result import PendingStep

logger = logging.getLogger(__name__)


class StepLoop:
    """Serves the steps of one worker; of a group of ranks, rank 0 alone answers."""

    def __init__(self, runner: ModelRunner, link: Receiver, max_steps_in_flight: int) -> None:
        self.runner = runner
        self.link = link
        self.max_steps_in_flight = max_steps_in_flight
        self.checksum = StepChecksum()
        self.pending: deque[PendingStep] = deque()

    def turn(self) -> None:
        """Take one frame, if there is one or nothing is under way; then send what is ready.

        Raises RuntimeError when the engine core takes no results any more.
        """
        frame = self.link.receive(timeout_s=0 if self.pending else None)
        if frame is not None:
            self._launch(frame)
        while self.pending and self.pending[0].is_ready():
            self._finish(self.pending.popleft())

    def _launch(self, frame: bytes) -> None:
        try:
            step = decode_scheduler_output(frame)
        except ValueError:  # msgspec's errors and bad UTF-8 both are one
            logger.warning("dropped a frame of %d bytes that is not a step", len(frame))
            return
        while len(self.pending) >= self.max_steps_in_flight:
            self._finish(self.pending.popleft())
        self.checksum.update(frame)
        self.pending.append(self.runner.launch(step, self.checksum.value))

    def _finish(self, step: PendingStep) -> None:
        result = step.result()
        if self.runner.group.rank == 0 and not self.link.send(encode(result)):
            raise RuntimeError("the engine core takes no results")
