"""What the engine core counts about itself.

Counters only grow, from the start of the process. Gauges are not kept: they are read from the structures that they
describe, so that they cannot drift from them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """See `protocol.engine_messages.EngineStats`; scheduled tokens include recomputed ones."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0


@dataclass(slots=True)
class FrameCounters:
    """Frames that were dropped because they mean nothing here."""

    num_bad_frames: int = 0

    def count_bad_frame(self) -> bool:
        """Count one more; True for the 1st, 2nd, 4th, 8th …, which are the ones to log: a flood must not fill it."""
        self.num_bad_frames += 1
        return self.num_bad_frames & (self.num_bad_frames - 1) == 0
