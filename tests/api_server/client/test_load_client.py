"""The load client against a server whose every fault is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from faulty_server import FaultyServer

from octavo.api_server.client import load_client
from octavo.api_server.client.load_client import BadAnswerError, Outcome, Target, complete, new_session
from octavo.api_server.client.workloads import Request

REQUEST = Request("one two three", 3, 5, 0.0)


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FaultyServer, str]]:
    async with FaultyServer().running() as served:
        yield served


async def ask(target: Target) -> Outcome:
    async with new_session(target) as session:
        return await complete(session, target, REQUEST)


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_good_answer_counts_by_usage_and_is_timed(fake: tuple[FaultyServer, str], is_chat: bool) -> None:
    outcome = await ask(Target(fake[1], "good", "A", is_chat=is_chat))
    assert outcome.is_good
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.text) == (3, 5, "w0w1w2w3w4")
    assert outcome.ttft_s is not None
    assert len(outcome.chunk_gaps_s) == 4
    assert 0 < outcome.ttft_s <= outcome.ttft_s + sum(outcome.chunk_gaps_s) <= outcome.end_to_end_s
    assert outcome.tpot_s == pytest.approx((outcome.end_to_end_s - outcome.ttft_s) / 4)


async def test_thoughts_are_text_too(fake: tuple[FaultyServer, str]) -> None:
    outcome = await ask(Target(fake[1], "thinking", "A", is_chat=True))
    assert (outcome.text, len(outcome.chunk_gaps_s)) == ("w0w1w2w3w4", 4)


@pytest.mark.parametrize(
    ("model", "error", "kind"),
    [
        ("refusing", "HTTP 400.*too long", "HTTP 400"),
        ("failing", "error in the stream.*lost its weights", "error in the stream"),
        ("uncounted", "no usage", "not a whole stream"),
        ("unfinished", "no finish_reason", "not a whole stream"),
        ("broken", "without \\[DONE\\]", "not a whole stream"),
    ],
)
async def test_a_bad_answer_is_an_error_that_says_why(
    fake: tuple[FaultyServer, str], model: str, error: str, kind: str
) -> None:
    outcome = await ask(Target(fake[1], model, "A"))
    assert not outcome.is_good
    with pytest.raises(BadAnswerError, match=error):
        raise BadAnswerError(outcome.error)
    assert outcome.error_kind == kind


async def test_a_server_that_is_not_there_is_an_error() -> None:
    outcome = await ask(Target("http://127.0.0.1:1", "good", "A"))
    assert outcome.error
    assert "ClientConnector" in outcome.error


async def test_a_wrong_length_is_no_success_unless_lengths_are_free(fake: tuple[FaultyServer, str]) -> None:
    forced = await ask(Target(fake[1], "short", "A"))
    free = await ask(Target(fake[1], "short", "A", length_control="none"))
    assert (forced.error, forced.wrong_length) == (None, "asked for 5 tokens, got 4 (finish_reason length)")
    assert free.is_good


def test_every_request_forces_its_length() -> None:
    eos, minimum, free = (
        load_client.body_of(Target("", "m", "A", length_control=control), REQUEST)
        for control in ("ignore_eos", "min_tokens", "none")
    )
    assert {body["max_tokens"] for body in (eos, minimum, free)} == {5}
    assert (eos["ignore_eos"], minimum["min_tokens"]) == (True, 5)
    assert not {"ignore_eos", "min_tokens"} & free.keys()
    assert eos["stream_options"] == {"include_usage": True}


async def test_a_closed_loop_keeps_its_concurrency_and_the_order_of_requests() -> None:
    in_flight = most = 0

    async def send(request: Request) -> Outcome:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.001 * (10 - request.num_output_tokens))
        in_flight -= 1
        return Outcome(request.num_output_tokens)

    requests = [Request("", 1, number, 0.0) for number in range(10)]
    outcomes = await load_client.run_closed_loop(send, requests, 3)
    assert most == 3
    assert [outcome.num_asked_tokens for outcome in outcomes] == list(range(10))


async def test_an_open_loop_sends_at_arrivals_without_waiting_for_answers() -> None:
    sent: list[int] = []
    all_sent = asyncio.Event()

    async def send(request: Request) -> Outcome:
        sent.append(request.num_output_tokens)
        if len(sent) == 3:
            all_sent.set()
        await all_sent.wait()
        return Outcome(request.num_output_tokens)

    requests = [Request("", 1, number, arrival_s) for number, arrival_s in ((0, 0.04), (1, 0.0), (2, 0.02))]
    outcomes = await load_client.run_open_loop(send, requests)
    assert sent == [1, 2, 0]
    assert [outcome.num_asked_tokens for outcome in outcomes] == [0, 1, 2]
