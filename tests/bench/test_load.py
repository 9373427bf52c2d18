"""load.py against a server whose every fault is known: reports, several servers, answers under load and alone."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import load
import pytest
import report
from faulty_server import FaultyServer

from octavo.api_server.client.load_client import Outcome


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FaultyServer, str]]:
    async with FaultyServer().running() as served:
        yield served


def arguments(url: str, out: Path, *more: str) -> list[str]:
    return ["--url", url, "--requests", "6", "--warmup", "2", "--out", str(out), "--output-tokens", "8", *more]


async def test_a_run_reports_everything(
    fake: tuple[FaultyServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    fake: tuple[FaultyServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    out = tmp_path / "runs.jsonl"
    assert not await load.run(load.parse_arguments(arguments(fake[1], out, "--model", model)))
    found = json.loads(out.read_text())
    assert found["errors" if model == "refusing" else "wrong_lengths"] == 6
    assert found["output_tok_s"] == 0
    assert f"A: first fault: {found['first_error']}" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "num_differing"), [("good", 0), ("unsteady", 12)])
async def test_answers_under_load_are_compared_with_answers_alone(
    fake: tuple[FaultyServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, num_differing: int
) -> None:
    out = tmp_path / "runs.jsonl"
    options = arguments(fake[1], out, "--model", model, "--workload", "fixed", "--compare-alone", "--requests", "12")
    assert await load.run(load.parse_arguments(options)) is (num_differing == 0)
    found = json.loads(out.read_text())
    assert (found["outputs_compared"], found["outputs_differing"]) == (12, num_differing)
    assert fake[0].most_in_flight == 12
    assert f"A: {num_differing} of 12 answers under load differ" in capsys.readouterr().out


async def test_two_servers_take_turns_with_the_same_requests_and_are_compared(
    fake: tuple[FaultyServer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
    assert (found.workload.name, found.concurrency, found.arrivals) == ("trace", concurrency, arrivals)
    assert found.workload.shapes[-1].arrival_s == last_arrival_s


def test_a_load_without_a_trace_is_a_closed_loop() -> None:
    found = load.load_of(load.parse_arguments(["--url", "http://a", "--model", "m", "--requests", "5"]))
    assert (found.concurrency, found.arrivals, len(found.workload.shapes)) == (8, "C=8", 5)
