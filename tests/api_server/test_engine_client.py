"""The client's log of live requests, with a socket of the test's own making."""

import asyncio
from collections import deque
from collections.abc import Sequence

import pytest
from fake_engine import logprob_rows
from hypothesis import given
from hypothesis import strategies as st

from octavo.api_server.engine_client import EngineClient, Generation
from octavo.api_server.errors import ApiError, ErrorKind
from octavo.api_server.metrics import Metrics
from octavo.protocol import codec
from octavo.protocol.engine_messages import (
    AbortRequests,
    AddRequest,
    BeamOutput,
    EngineCommand,
    EngineOutput,
    EngineStats,
    FinishReason,
    Hello,
    RequestOutput,
)
from octavo.protocol.logprobs import PromptLogprobs, TokenLogprobs
from octavo.protocol.sampling_params import SamplingParams

STATS = EngineStats(0, 0, 0, 1, 0, 0, 0)


class Frames:
    """A connection that always has its next frame at once, and keeps what is sent."""

    def __init__(self) -> None:
        self.incoming: deque[bytes] = deque()
        self.sent: list[EngineCommand] = []

    async def receive(self) -> bytes:
        if not self.incoming:
            await asyncio.Event().wait()
        return self.incoming.popleft()

    async def send(self, frame: bytes) -> None:
        self.sent.append(codec.decode_engine_command(frame))

    def close(self) -> None:
        pass

    def deliver(self, *outputs: RequestOutput) -> None:
        self.incoming.append(codec.encode(EngineOutput([*outputs], STATS)))


class Bench:
    """A client whose loops run by hand."""

    def __init__(self) -> None:
        self.frames = Frames()
        self.client = EngineClient("ipc:///nowhere/engine", "api-0", Metrics())
        self.client.close()
        self.client._connection = self.frames
        self.started: list[int] = []

    def generate(self, requests: list[AddRequest]) -> Generation:
        return self.client.generate(requests, self.started.append)

    async def run(self) -> None:
        """Let both loops do all they can."""
        tasks = [asyncio.create_task(self.client.send_forever()), asyncio.create_task(self.client.receive_forever())]
        while self.frames.incoming:  # noqa: ASYNC110 - the loops empty it
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()

    def aborted(self) -> list[str]:
        return [i for command in self.frames.sent if isinstance(command, AbortRequests) for i in command.request_ids]

    def finished(self) -> dict[str, int]:
        return {reason: count for reason, count in self.client.metrics.finished.items() if count}


def request(request_id: str) -> AddRequest:
    return AddRequest(request_id, [1, 2], SamplingParams(100), 0.0)


def output(
    request_id: str, first_index: int, token_ids: list[int], reason: FinishReason | None = None
) -> RequestOutput:
    return RequestOutput(request_id, first_index, token_ids, reason, logprobs=logprob_rows(token_ids, first_index, 1))


def logged_ids(pieces: Sequence[TokenLogprobs]) -> list[int]:
    """The tokens that rows of logprobs belong to."""
    return [token_ids[0] for piece in pieces for token_ids, _ in piece.rows()]


async def test_hello_comes_first_and_requests_keep_their_order() -> None:
    bench = Bench()
    with bench.generate([request("a"), request("b")]):
        await bench.run()
    assert isinstance(bench.frames.sent[0], Hello)
    assert [command.request_id for command in bench.frames.sent[1:3]] == ["a", "b"]


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.booleans()), max_size=20),
    st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH]),
)
async def test_any_repeats_give_each_token_once_and_one_ending(
    steps: list[tuple[int, int, bool]], reason: FinishReason | None
) -> None:
    """Steps are (tokens repeated, tokens new, whether the consumer takes what is there)."""
    bench = Bench()
    received: list[int] = []
    num_sent = 0
    with bench.generate([request("a")]) as generation:
        for num_repeated, num_new, is_taken in steps:
            first = max(0, num_sent - num_repeated)
            bench.frames.deliver(output("a", first, list(range(first, num_sent + num_new))))
            num_sent += num_new
            await bench.run()
            if is_taken and len(received) < num_sent:
                for update in await generation.updates():
                    received += update.token_ids
                    assert logged_ids(update.logprobs) == update.token_ids
        if reason is not None:
            bench.frames.deliver(output("a", num_sent, [num_sent], reason))
            await bench.run()
            updates = await generation.updates()
            received += [token for update in updates for token in update.token_ids]
            assert [update.finish_reason for update in updates] == [reason]
            assert received == list(range(num_sent + 1))
    await bench.run()
    assert received == list(range(len(received)))
    assert bench.aborted() == ([] if reason is not None else ["a"])
    assert bench.finished() == {"abort" if reason is None else reason.value: 1}
    assert bench.client.metrics.num_generation_tokens == num_sent + (reason is not None)


async def test_only_changed_choices_are_updated_and_only_running_ones_aborted() -> None:
    bench = Bench()
    with bench.generate([request("a"), request("b"), request("c")]) as generation:
        bench.frames.deliver(output("c", 0, [7]), output("a", 0, [5], FinishReason.STOP))
        await bench.run()
        updates = await generation.updates()
        assert [(update.index, update.token_ids) for update in updates] == [(2, [7]), (0, [5])]
        generation.stop(0)
        generation.stop(1)
        generation.stop(1)
    await bench.run()
    assert bench.aborted() == ["b", "c"]
    assert bench.finished() == {"stop": 2, "abort": 1}


async def test_the_first_output_starts_a_request_and_says_what_was_cached() -> None:
    bench = Bench()
    with bench.generate([request("a"), request("b"), request("c")]) as generation:
        for first_index, num_cached_tokens in ((0, 16), (1, 99), (2, 0)):
            bench.frames.deliver(RequestOutput("b", first_index, [5], None, None, num_cached_tokens))
            await bench.run()
            assert bench.started == [1]
        bench.frames.deliver(RequestOutput("c", 0, [], FinishReason.LENGTH, None, 3))
        await bench.run()
        assert bench.started == [1, 2]
        assert [live.num_cached_tokens for live in generation.live_requests] == [None, 16, 3]


async def test_the_tokens_of_all_beams_count_and_the_search_is_one_finished_request() -> None:
    bench = Bench()
    beams = [BeamOutput([1, 2, 3], -0.5, FinishReason.STOP, 3), BeamOutput([4], -0.7, FinishReason.LENGTH)]
    with bench.generate([request("a")]) as generation:
        bench.frames.deliver(RequestOutput("a", 0, [], FinishReason.STOP, beams=beams))
        await bench.run()
        (update,) = await generation.updates()
        assert update.ending is not None
        assert update.ending.beams == beams
    assert bench.client.metrics.num_generation_tokens == 4
    assert bench.client.metrics.num_prompt_tokens == 2
    assert sum(bench.client.metrics.end_to_end.counts) == 1
    assert sum(bench.client.metrics.time_per_output_token.counts) == 0
    assert bench.finished() == {"stop": 1}


async def test_output_after_the_end_is_ignored() -> None:
    bench = Bench()
    with bench.generate([request("a")]) as generation:
        generation.stop(0)
        bench.frames.deliver(output("a", 0, [1], FinishReason.LENGTH))
        await bench.run()
    await bench.run()
    assert bench.aborted() == ["a"]
    assert bench.finished() == {"stop": 1}
    assert bench.client.metrics.num_generation_tokens == 0


async def test_wake_returns_nothing_and_fail_raises_everywhere() -> None:
    bench = Bench()
    error = ApiError(ErrorKind.SHUTTING_DOWN, "x")

    async def wait_in(generation: Generation) -> None:
        with generation:
            assert await generation.updates() == []
            with pytest.raises(ApiError) as problem:
                await generation.updates()
            assert problem.value is error

    generations = [bench.generate([request(name)]) for name in "ab"]
    tasks = [asyncio.create_task(wait_in(generation)) for generation in generations]
    await asyncio.sleep(0)
    for generation in generations:
        generation.wake()
    await asyncio.sleep(0)
    bench.client.fail_all(error)
    await asyncio.gather(*tasks)
    assert bench.finished() == {"error": 2}


async def test_a_flood_of_frames_leaves_the_consumers_their_turn() -> None:
    bench = Bench()
    turns_seen: list[int] = []
    with bench.generate([request("a")]) as generation:
        for index in range(100):
            bench.frames.deliver(output("a", index, [index]))

        async def consume() -> None:
            while not turns_seen or turns_seen[-1] < 99:
                for update in await generation.updates():
                    turns_seen.append(update.token_ids[-1])

        consumer = asyncio.create_task(consume())
        await bench.run()
        await asyncio.wait_for(consumer, 10)
    assert len(turns_seen) > 50


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=8))
async def test_any_repeats_give_the_logprobs_of_each_prompt_token_once(steps: list[tuple[int, int]]) -> None:
    """Steps are (rows repeated, rows new); position 0 has no row."""
    bench = Bench()
    num_rows = 0
    with bench.generate([request("a")]) as generation:
        for num_repeated, num_new in steps:
            first = 1 + max(0, num_rows - num_repeated)
            rows = logprob_rows(range(first, 1 + num_rows + num_new), first, 1)
            bench.frames.deliver(RequestOutput("a", 0, [], prompt_logprobs=PromptLogprobs(first, rows)))
            num_rows += num_new
        await bench.run()
        live = generation.live_requests[0]
        assert logged_ids(live.prompt_logprobs) == list(range(1, 1 + num_rows))
        assert live.num_prompt_rows == num_rows


async def test_a_gap_in_the_logprobs_of_a_prompt_fails_the_request() -> None:
    bench = Bench()
    with bench.generate([request("a")]) as generation:
        rows = logprob_rows([5], 2, 0)
        bench.frames.deliver(RequestOutput("a", 0, [], prompt_logprobs=PromptLogprobs(2, rows)))
        await bench.run()
        with pytest.raises(ApiError) as problem:
            await generation.updates()
    assert problem.value.kind is ErrorKind.INTERNAL
