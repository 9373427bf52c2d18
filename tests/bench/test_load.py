"""The benchmark client against a server whose every fault is known."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import load
import load_client
import pytest
import report
from aiohttp import web
from aiohttp.test_utils import TestServer
from load_client import BadAnswerError, Outcome, Target, complete, new_session
from workloads import Request

REQUEST = Request("one two three", 3, 5, 0.0)


class FakeServer:
    """Streams `max_tokens` words. The model's name says what goes wrong."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = 0
        self.most_in_flight = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/{endpoint:completions|chat/completions}", self.generate)
        app.router.add_get("/health", self.health)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body["model"] == "refusing":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.stream(request, body)
        finally:
            self.in_flight -= 1

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault, num_tokens = body["model"], body["max_tokens"] - (body["model"] == "short")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        for index in range(num_tokens):
            await asyncio.sleep(0.001)
            if fault == "failing" and index == 2:
                await send({"error": {"message": "lost its weights"}})
                return response
            word = f"w{index}" if fault != "unsteady" or self.in_flight == 1 else "other"
            choice = {"delta": {"content": word}} if "messages" in body else {"text": word}
            is_last = index == num_tokens - 1 and fault != "unfinished"
            await send({"choices": [{**choice, "finish_reason": "length" if is_last else None}]})
        usage = {"prompt_tokens": 3, "completion_tokens": num_tokens}
        if fault != "uncounted":
            await send({"choices": [], "usage": usage})
        if fault != "broken":
            await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeServer, str]]:
    server = FakeServer()
    async with TestServer(server.app()) as running:
        yield server, str(running.make_url("")).rstrip("/")


async def ask(target: Target) -> Outcome:
    async with new_session(target) as session:
        return await complete(session, target, REQUEST)


@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_good_answer_counts_by_usage_and_is_timed(fake: tuple[FakeServer, str], is_chat: bool) -> None:
    outcome = await ask(Target(fake[1], "good", "A", is_chat=is_chat))
    assert outcome.is_good
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.text) == (3, 5, "w0w1w2w3w4")
    assert outcome.ttft_s is not None
    assert len(outcome.chunk_gaps_s) == 4
    assert 0 < outcome.ttft_s <= outcome.ttft_s + sum(outcome.chunk_gaps_s) <= outcome.end_to_end_s
    assert outcome.tpot_s == pytest.approx((outcome.end_to_end_s - outcome.ttft_s) / 4)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("refusing", "HTTP 400.*too long"),
        ("failing", "error in the stream.*lost its weights"),
        ("uncounted", "no usage"),
        ("unfinished", "no finish_reason"),
        ("broken", "without \\[DONE\\]"),
    ],
)
async def test_a_bad_answer_is_an_error_that_says_why(fake: tuple[FakeServer, str], model: str, error: str) -> None:
    outcome = await ask(Target(fake[1], model, "A"))
    assert not outcome.is_good
    with pytest.raises(BadAnswerError, match=error):
        raise BadAnswerError(outcome.error)


async def test_a_server_that_is_not_there_is_an_error() -> None:
    outcome = await ask(Target("http://127.0.0.1:1", "good", "A"))
    assert outcome.error
    assert "ClientConnector" in outcome.error


async def test_a_wrong_length_is_no_success_unless_lengths_are_free(fake: tuple[FakeServer, str]) -> None:
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


def arguments(url: str, out: Path, *more: str) -> list[str]:
    return ["--url", url, "--requests", "6", "--warmup", "2", "--out", str(out), "--output-tokens", "8", *more]


async def test_a_run_reports_everything(
    fake: tuple[FakeServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = fake
    out = tmp_path / "runs.jsonl"
    options = (
        "--model",
        "good",
        "--workload",
        "fixed",
        "--concurrency",
        "3",
        "--probe-health",
        "--pid",
        str(os.getpid()),
    )
    assert await load.run(load.parse_arguments(arguments(url, out, *options)))
    (found,) = map(json.loads, out.read_text().splitlines())
    assert (found["requests"], found["errors"], found["wrong_lengths"], found["output_tokens"]) == (6, 0, 0, 48)
    assert found["output_tokens"] / found["seconds"] == pytest.approx(found["output_tok_s"], rel=0.001)
    assert found["ttft_p50_ms"] <= found["ttft_p90_ms"] <= found["ttft_p99_ms"] <= found["end_to_end_p99_ms"]
    assert found["peak_rss_mib"] > 10
    assert found["health_errors"] == 0
    assert found["health_probes"] > 0
    assert found["health_p50_ms"] <= found["health_p99_ms"] <= found["health_max_ms"]
    assert found["load"] == "C=3"
    assert server.most_in_flight == 3
    assert len(server.bodies) == 8
    prompts = [body["prompt"] for body in server.bodies]
    assert len(set(prompts)) == 8, "a warm-up prompt came again"
    assert "| A | fixed | C=3 | 6 | 0 | 0 |" in capsys.readouterr().out


@pytest.mark.parametrize("model", ["short", "refusing"])
async def test_a_run_with_faults_is_not_clean(
    fake: tuple[FakeServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    out = tmp_path / "runs.jsonl"
    assert not await load.run(load.parse_arguments(arguments(fake[1], out, "--model", model)))
    found = json.loads(out.read_text())
    assert found["errors" if model == "refusing" else "wrong_lengths"] == 6
    assert found["output_tok_s"] == 0
    assert f"A: first fault: {found['first_error']}" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "num_differing"), [("good", 0), ("unsteady", 12)])
async def test_answers_under_load_are_compared_with_answers_alone(
    fake: tuple[FakeServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, num_differing: int
) -> None:
    out = tmp_path / "runs.jsonl"
    options = arguments(fake[1], out, "--model", model, "--workload", "fixed", "--compare-alone", "--requests", "12")
    assert await load.run(load.parse_arguments(options)) is (num_differing == 0)
    found = json.loads(out.read_text())
    assert (found["outputs_compared"], found["outputs_differing"]) == (12, num_differing)
    assert fake[0].most_in_flight == 12
    assert f"A: {num_differing} of 12 answers under load differ" in capsys.readouterr().out


async def test_two_servers_take_turns_with_the_same_requests_and_are_compared(
    fake: tuple[FakeServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = fake
    out = tmp_path / "runs.jsonl"
    options = arguments(
        url, out, "--url", url, "--model", "first", "--model", "second", "--rounds", "2", "--warmup", "0"
    )
    assert await load.run(load.parse_arguments(options))
    runs = [server.bodies[start : start + 6] for start in range(0, 24, 6)]
    assert [body["model"] for (body, *_) in runs] == ["first", "second", "first", "second"]
    prompts = [{body["prompt"] for body in bodies} for bodies in runs]
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]
    assert not prompts[0] & prompts[2]
    *reports, comparison = map(json.loads, out.read_text().splitlines())
    assert len(reports) == 4
    rates = [found["output_tok_s"] for found in reports]
    assert comparison["comparison"]["output_tok_s"]["runs"] == [rates[:2], rates[2:]]
    assert "| median of | A | B | B : A |" in capsys.readouterr().out


def test_an_option_serves_all_servers_or_each_has_its_own() -> None:
    assert load.per_server("model", ["m"], 2) == ["m", "m"]
    assert load.per_server("model", ["m", "n"], 2) == ["m", "n"]
    with pytest.raises(ValueError, match="--pid: 2 values for 3 servers"):
        load.per_server("pid", [1, 2], 3)


def test_a_failed_answer_is_not_the_same_as_another_failed_answer() -> None:
    failed = Outcome(5, error="gone")
    good = Outcome(5, text="same", num_output_tokens=5)
    assert report.compare_answers([good, failed], [good, failed])["outputs_differing"] == 1


@pytest.mark.parametrize(
    ("options", "concurrency", "arrivals", "last_arrival_s"),
    [
        ([], None, "trace × 2", 10.0),
        (["--concurrency", "2"], 2, "C=2", 10.0),
        (["--compare-alone"], 3, "C=3", 10.0),
        (["--rate", "1000"], None, "1000/s", pytest.approx(0.002, abs=0.01)),
    ],
)
def test_a_trace_gives_the_arrivals_unless_something_else_is_asked(
    tmp_path: Path, options: list[str], concurrency: int | None, arrivals: str, last_arrival_s: float
) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 9, "output_length": 9, "hash_ids": [0]}
    trace.write_text("".join(json.dumps({"timestamp": ms, **row}) + "\n" for ms in (0, 1000, 5000)))
    always = ["--url", "http://a", "--model", "m", "--trace", str(trace), "--time-scale", "2"]
    found = load.load_of(load.parse_arguments([*always, *options]))
    assert (found.name, found.concurrency, found.arrivals) == ("trace", concurrency, arrivals)
    assert found.shapes[-1].arrival_s == last_arrival_s


def test_a_load_without_a_trace_is_a_closed_loop() -> None:
    found = load.load_of(load.parse_arguments(["--url", "http://a", "--model", "m", "--requests", "5"]))
    assert (found.concurrency, found.arrivals, len(found.shapes)) == (8, "C=8", 5)
