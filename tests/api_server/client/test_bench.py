"""`octavo bench` against a server whose every fault is known: what is sent, figures, files, exit status."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from faulty_server import FaultyServer
from server_process import OCTAVO

from octavo.api_server.client import bench
from octavo.api_server.client.bench_run import load_of, target_of
from octavo.api_server.client.workloads import FileWorkload, ShapedWorkload, read_prompts

PROMPTS = '{"prompt": "one two", "max_tokens": 3}\n\n{"prompt": "three"}\n'
CHATS = '{"messages": [{"role": "user", "content": "Hi"}]}\n'


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FaultyServer, str]]:
    async with FaultyServer().running() as served:
        yield served


async def run(url: str, *arguments: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of the command."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(OCTAVO, "bench", "--url", url, *arguments, stdout=pipe, stderr=pipe)
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


def parse(*arguments: str) -> argparse.Namespace:
    return bench.build_parser(None).parse_args(["--model", "m", *arguments])


async def test_a_run_prints_tables_and_writes_figures(fake: tuple[FaultyServer, str], tmp_path: Path) -> None:
    server, url = fake
    out = tmp_path / "figures.json"
    arguments = (
        "--workload",
        "fixed",
        "--output-tokens",
        "4",
        "--requests",
        "6",
        "--concurrency",
        "3",
        "--warmup",
        "2",
    )
    status, output, errors = await run(url, "--model", "good", *arguments, "--json", str(out), "--api-key", "secret")
    assert (status, errors) == (0, "")
    assert output.startswith("| requests | errors |")
    assert [line.split(" | ")[0] for line in output.splitlines()[6:]] == ["| TTFT", "| TPOT", "| ITL", "| end to end"]
    found = json.loads(out.read_text())
    assert (found["requests"], found["errors"], found["output_tokens"], found["load"]) == (6, 0, 24, "C=3")
    assert found["total_tok_s"] == pytest.approx(found["prompt_tok_s"] + found["output_tok_s"], abs=0.2)
    assert len(server.bodies) == 8
    assert server.most_in_flight == 3
    assert "secret" not in out.read_text() + output
    assert set(server.keys) == {"Bearer secret"}


async def test_some_errors_are_counted_by_kind_and_shown_safely(fake: tuple[FaultyServer, str]) -> None:
    status, output, _ = await run(
        fake[1], "--model", "sometimes", "--requests", "4", "--concurrency", "1", "--warmup", "0"
    )
    assert status == 1
    assert "2 × error in the stream" in output
    assert "first fault: error in the stream: lost ␛[2J" in output


@pytest.mark.parametrize(("model", "words"), [("refusing", "HTTP 400"), ("failing", "error in the stream")])
async def test_a_server_that_answers_nothing_is_one_line(
    fake: tuple[FaultyServer, str], model: str, words: str
) -> None:
    status, output, errors = await run(fake[1], "--model", model, "--requests", "3")
    assert (status, output) == (1, "")
    assert errors.startswith(f"octavo: error: {fake[1]} answered no request; the first fault: {words}")
    assert errors.count("\n") == 1


async def test_a_wrong_length_is_a_fault_only_of_forced_lengths(fake: tuple[FaultyServer, str]) -> None:
    forced, _, _ = await run(fake[1], "--model", "short", "--requests", "2")
    free, _, _ = await run(fake[1], "--model", "short", "--requests", "2", "--length-control", "none")
    assert (forced, free) == (1, 0)


async def test_somebodys_own_prompts_are_sent_as_they_are(fake: tuple[FaultyServer, str], tmp_path: Path) -> None:
    server, url = fake
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS)
    status, _, errors = await run(
        url, "--model", "short", "--prompts", str(path), "--output-tokens", "7", "--warmup", "1"
    )
    assert (status, errors) == (0, ""), "their answers may end by themselves"
    warm_up, *bodies = server.bodies
    assert {body["prompt"]: body["max_tokens"] for body in bodies} == {"one two": 3, "three": 7}
    assert all("ignore_eos" not in body for body in bodies)
    assert warm_up["prompt"] not in ("one two", "three")


async def test_a_file_of_messages_goes_to_chats(fake: tuple[FaultyServer, str], tmp_path: Path) -> None:
    server, url = fake
    path = tmp_path / "chats.jsonl"
    path.write_text(CHATS)
    status, _, errors = await run(url, "--model", "good", "--prompts", str(path), "--warmup", "0")
    assert (status, errors) == (0, "")
    assert [body["messages"] for body in server.bodies] == [[{"role": "user", "content": "Hi"}]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{"prompt": 5}', "line 2: Expected `str"),
        ('{"prompt": "a", "messages": [{}]}', "line 1: needs either prompt or messages"),
        ("{}", "line 1: needs either"),
        ('{"prompt": "a", "maxtokens": 5}', "line 1: Object contains unknown field"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: Expected `int` >= 1"),
        ("{", "line 1: "),
        (PROMPTS + CHATS, "mixes prompts and messages"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_prompts(path, None, 5, None)


def test_the_first_lines_of_a_file_at_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' * 50)
    load = load_of(parse("--prompts", str(path), "--requests", "20", "--rate", "5"))
    arrivals_s = [request.arrival_s for request in load.workload.requests("0")]
    assert (len(arrivals_s), load.concurrency, load.arrivals) == (20, None, "5/s")
    assert arrivals_s == sorted(arrivals_s)
    assert (arrivals_s[0], len(set(arrivals_s))) == (0.0, 20)


@pytest.mark.parametrize(
    ("arguments", "concurrency", "arrivals", "count"),
    [
        ((), 8, "C=8", 64),
        (("--concurrency", "2", "--requests", "5"), 2, "C=2", 5),
        (("--rate", "2.5"), None, "2.5/s", 64),
    ],
)
def test_a_made_up_load(arguments: tuple[str, ...], concurrency: int | None, arrivals: str, count: int) -> None:
    load = load_of(parse(*arguments))
    assert isinstance(load.workload, ShapedWorkload)
    assert (load.concurrency, load.arrivals, len(load.workload.shapes)) == (concurrency, arrivals, count)
    assert (load.workload.shapes[-1].arrival_s > 0) == (concurrency is None)


def test_the_target() -> None:
    load = load_of(parse())
    made_up = target_of(parse("--url", "http://a:1/v1/", "--api-key", "sesame"), load.workload)
    assert (made_up.url, made_up.length_control, made_up.is_chat) == ("http://a:1", "ignore_eos", False)
    assert made_up.api_key == "sesame"
    assert "sesame" not in repr(made_up)
    own = target_of(parse("--chat"), FileWorkload("x", load.workload.requests("0")))
    assert (own.length_control, own.is_chat) == ("none", True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rate", "1", "--concurrency", "1"], "argument --rate: excludes --concurrency"),
        (["--requests", "0"], "argument --requests: must be a number above 0, got '0'"),
        (["--rate", "x"], "argument --rate: must be a number above 0"),
        (["--warmup", "-1"], "argument --warmup: "),
        (["--prompts", "/nowhere"], "[Errno 2] No such file or directory: '/nowhere'"),
        (["--tokenizer", "/dev/null"], "/dev/null is no tokenizer.json"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], words: str) -> None:
    command = [OCTAVO, "bench", "--model", "m", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode in (1, 2)
    assert result.stderr.startswith(f"octavo: error: {words}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["bench", "chat"])
def test_help_loads_nothing_heavy(command: str) -> None:
    program = (
        "import sys; from octavo.api_server import cli; sys.argv = ['octavo', sys.argv[1], '--help']\n"
        "try: cli.main()\nexcept SystemExit as end: print('status', end.code, *sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program, command], capture_output=True, text=True, check=True)
    assert f"usage: octavo {command}" in result.stdout
    loaded: set[Any] = set(result.stdout.partition("status 0")[2].split())
    assert loaded
    assert not loaded & {"torch", "zmq", "aiohttp", "numpy", "tokenizers", "transformers"}
