"""A worker's loop: steps are launched when they come, results go back in order and when they are there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

from octavo.protocol.codec import decode_worker_event, encode
from octavo.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput
from octavo.worker.distributed_checksum import StepChecksum
from octavo.worker.step_loop import IDLE_AFTER_S, StepLoop

MAX_STEPS = 2


class Link:
    """Frames that are there, and those that were sent; says how long it was waited for."""

    def __init__(self, *frames: bytes) -> None:
        self.frames = deque(frames)
        self.sent: list[ModelRunnerOutput] = []
        self.timeouts_s: list[float | None] = []
        self.takes_more = True

    def receive(self, timeout_s: float | None) -> bytes | None:
        self.timeouts_s.append(timeout_s)
        return self.frames.popleft() if self.frames else None

    def send(self, frame: bytes) -> bool:
        self.sent.append(decode_worker_event(frame))
        return self.takes_more


class Step:
    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.ready = False
        self.is_taken = False

    def is_ready(self) -> bool:
        return self.ready

    def result(self) -> ModelRunnerOutput:
        self.is_taken = True
        return ModelRunnerOutput(self.step_id, [])


class Runner:
    def __init__(self, rank: int = 0) -> None:
        self.group = self
        self.rank = rank
        self.steps: list[Step] = []
        self.checksums: list[int] = []
        self.before_launch: Callable[[], object] = lambda: None

    def launch(self, step: SchedulerOutput, checksum: int) -> Step:
        self.before_launch()
        self.steps.append(Step(step.step_id))
        self.checksums.append(checksum)
        return self.steps[-1]


def frame(step_id: int) -> bytes:
    return encode(SchedulerOutput(step_id, [], [], [], [], [], [], {}))


def test_the_next_step_is_launched_while_one_is_under_way():
    runner, link = Runner(), Link(frame(0), frame(1))
    loop = StepLoop(runner, link, MAX_STEPS)
    loop.turn()
    loop.turn()
    assert [step.step_id for step in runner.steps] == [0, 1]
    assert link.sent == []
    assert link.timeouts_s == [None, 0], "it waits only when nothing is under way"

    runner.steps[1].ready = True
    loop.turn()
    assert link.sent == [], "results go in order"
    runner.steps[0].ready = True
    loop.turn()
    assert [result.step_id for result in link.sent] == [0, 1]
    loop.turn()
    assert link.timeouts_s[-1] is None


def test_every_step_has_the_checksum_of_all_so_far():
    runner, link = Runner(), Link(frame(0), b"no step", frame(1))
    loop = StepLoop(runner, link, MAX_STEPS)
    for _ in range(3):
        loop.turn()
    checksum = StepChecksum()
    for number in range(2):
        checksum.update(frame(number))
        assert runner.checksums[number] == checksum.value


def test_other_ranks_do_not_answer():
    runner, link = Runner(rank=1), Link(frame(0))
    loop = StepLoop(runner, link, MAX_STEPS)
    loop.turn()
    runner.steps[0].ready = True
    loop.turn()
    assert (link.sent, loop.pending) == ([], deque())


def test_a_rank_that_is_behind_takes_the_oldest_result_before_it_launches_a_step_more():
    """The engine core goes by rank 0's results, and the next step may need rows of requests that have ended."""
    runner, link = Runner(rank=1), Link(*(frame(number) for number in range(3)))
    loop = StepLoop(runner, link, MAX_STEPS)
    nums_taken = []
    runner.before_launch = lambda: nums_taken.append(sum(step.is_taken for step in runner.steps))
    for _ in range(3):
        loop.turn()
    assert nums_taken == [0, 0, 1]
    assert runner.steps[0].is_taken
    assert len(loop.pending) == MAX_STEPS


def test_a_result_that_nobody_takes_ends_the_worker():
    runner, link = Runner(), Link(frame(0))
    link.takes_more = False
    loop = StepLoop(runner, link, MAX_STEPS)
    loop.turn()
    runner.steps[0].ready = True
    with pytest.raises(RuntimeError, match="takes no results"):
        loop.turn()


class Pages:
    """A supply that lacks some pieces."""

    def __init__(self, num_lacking: int) -> None:
        self.num_lacking = num_lacking
        self.noted: list[int] = []

    @property
    def lacks_some(self) -> bool:
        return self.num_lacking > 0

    def add_some(self) -> None:
        self.num_lacking -= 1

    def note(self, step: SchedulerOutput) -> None:
        self.noted.append(step.step_id)


def test_pages_are_taken_when_no_step_came_for_a_while():
    runner, link, pages = Runner(), Link(), Pages(3)
    loop = StepLoop(runner, link, MAX_STEPS, pages)
    loop.turn()
    loop.turn()
    assert (pages.num_lacking, link.timeouts_s) == (1, [IDLE_AFTER_S, 0])

    link.frames.append(frame(0))
    loop.turn()
    loop.turn()
    assert (pages.num_lacking, pages.noted, link.timeouts_s[2:]) == (1, [0], [0, 0]), "not beside a step"

    runner.steps[0].ready = True
    loop.turn()
    loop.turn()
    assert (pages.num_lacking, link.timeouts_s[4:]) == (0, [0, IDLE_AFTER_S]), "and not right behind one"
    loop.turn()
    assert link.timeouts_s[6:] == [None]
