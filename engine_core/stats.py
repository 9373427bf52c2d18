"""What the engine core counts about itself.

Counters only grow, from the start of the process. Gauges are not kept: they are read from the structures that they
describe, so that they cannot drift from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.protocol.engine_messages import EngineStats

if TYPE_CHECKING:
    from octavo.engine_core.scheduler import Scheduler


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


def read_stats(scheduler: Scheduler) -> EngineStats:
    """Return the state right now."""
    manager, counters = scheduler.kv_cache_manager, scheduler.counters
    return EngineStats(
        num_running_requests=len(scheduler.running),
        num_waiting_requests=len(scheduler.waiting),
        num_used_blocks=manager.num_used_blocks,
        num_total_blocks=manager.num_total_blocks,
        num_steps=counters.num_steps,
        num_scheduled_tokens=counters.num_scheduled_tokens,
        num_preemptions=counters.num_preemptions,
        num_swapped_requests=len(manager.host_tables),
        num_cached_blocks=len(manager.device_pool.cached),
        num_used_host_blocks=manager.host_pool.num_held_blocks,
        num_total_host_blocks=manager.host_pool.num_blocks,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_cached_tokens=counters.num_cached_tokens,
        num_recomputed_tokens=counters.num_recomputed_tokens,
        num_swapped_out_blocks=manager.num_swapped_out_blocks,
        num_swapped_in_blocks=manager.num_swapped_in_blocks,
    )
