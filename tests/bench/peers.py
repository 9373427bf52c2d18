"""Octavo beside other servers: the same weights, machine, client and requests, one server at a time, in turn.

    PYTHONPATH=tests python tests/bench/peers.py --directory /opt/peers --rounds 3 \\
        --octavo 'auto=smollm2-135m' --octavo 'bf16=smollm2-135m --quantization none --dtype bfloat16' \\
        --peer vllm --peer openvino-int8 --peer llamacpp-q8_0 --workload c1 --workload c8 --out peers.jsonl

Each round starts every server in turn, measures its start, runs the workloads, watches it at rest, and ends it: A B A
B. The first run installs the peers and writes their weights under --directory, which takes up to an hour on two cores.
A peer that cannot be installed or started is named in one line and left out. Exits with 1 when that happened to Octavo,
or when it failed a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import load
import psutil
import report
import uvloop
from embedded_model import locate_embedded_model
from peer_install import Installer, PeerError
from peer_models import EMBEDDED_MODEL, Models
from peer_process import OtherWork, RunningServer, rest, running
from peer_report import Results, Run
from peer_servers import OCTAVO, PEERS, Server, octavo

from octavo.api_server.client.bench import positive
from octavo.api_server.client.load_report import Report

DEFAULT_DIRECTORY = Path.home() / ".cache" / "octavo-peers"
DEFAULT_OCTAVO = f"default={EMBEDDED_MODEL}"
SETTLE_S = 2.0
SEEDS_PER_ROUND = 100


@dataclass(frozen=True)
class Workload:
    """What is asked of every server, as arguments of load.py."""

    name: str
    shape: str
    concurrency: int
    num_requests: int

    def arguments(self, tokenizer: Path | None) -> list[str]:
        """Return load.py's arguments; each server's own come from its target."""
        exact = ["--tokenizer", str(tokenizer)] if tokenizer else []
        numbers = ["--concurrency", str(self.concurrency), "--requests", str(self.num_requests)]
        return ["--url", "-", "--model", "-", "--workload", self.shape, *numbers, *exact]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("c1", "mixed", 1, 12),
        Workload("c8", "mixed", 8, 64),
        Workload("c32", "mixed", 32, 64),
        Workload("shared-prefix", "shared-prefix", 16, 64),
    )
}


def visits(server: Server, workloads: Sequence[Workload]) -> list[list[Workload]]:
    """Return which workloads share a start of the server: all, or each its own where its size is set at the start."""
    return [[workload] for workload in workloads] if server.is_sized_by_concurrency else [list(workloads)]


class Bench:
    """One run of the benchmark: what is measured, and what was found."""

    def __init__(self, installer: Installer, workloads: Sequence[Workload], tokenizer: Path, args: argparse.Namespace):
        self._installer = installer
        self._workloads = workloads
        self._tokenizer = tokenizer
        self._args = args
        self.runs: list[Run] = []

    async def measure(self, servers: Sequence[Server]) -> list[Server]:
        """Measure all servers in all rounds; return those that could not be."""
        failed: list[Server] = []
        for number in range(self._args.rounds):
            for server in servers:
                if server in failed:
                    continue
                try:
                    for shared in visits(server, self._workloads):
                        await self._visit(server, shared, number)
                except (PeerError, OSError, psutil.NoSuchProcess) as problem:
                    print(f"{server.label} is left out: {problem}", flush=True)
                    failed.append(server)
        return failed

    async def _visit(self, server: Server, workloads: Sequence[Workload], number: int) -> None:
        """Start a server, run workloads on it, watch it at rest, end it."""
        concurrency = max(workload.concurrency for workload in workloads)
        print(f"round {number + 1}, {server.label}: {shlex.join(server.command)}", flush=True)
        async with running(server, concurrency, self._installer.log(server.label)) as started:
            start_pss_mib = in_mib((await rest(started.pid, 1.0)).pss_bytes)
            print(f"first token after {started.cold_start_s:.1f} s", report.header(), sep="\n", flush=True)
            found = [await self._load(started, workload, number) for workload in workloads]
            await asyncio.sleep(SETTLE_S)
            idle = await rest(started.pid, self._args.rest_s)
        facts = {
            "round": number + 1,
            "cold_start_s": round(started.cold_start_s, 2),
            "start_pss_mib": start_pss_mib,
            "idle_cpu": round(idle.idle_cpu, 4),
            "idle_pss_mib": in_mib(idle.pss_bytes),
            "server_command": shlex.join(server.command),
        }
        for workload, one in zip(workloads, found, strict=True):
            self.runs.append(Run(server, workload.name, one | facts))
            self._store(self.runs[-1].report)

    def _store(self, found: Report) -> None:
        if self._args.out:
            with self._args.out.open("a") as file:
                file.write(json.dumps(found) + "\n")

    async def _load(self, started: RunningServer, workload: Workload, number: int) -> Report:
        """Run a workload once. Every one of a round has a text of its own, so that no prefix cache knows it."""
        load_args = load.parse_arguments(workload.arguments(self._tokenizer))
        seed = number * SEEDS_PER_ROUND + list(WORKLOADS).index(workload.name)
        other = OtherWork(started.pid)
        found = await load.measure(started.target, load.load_of(load_args), seed, load_args)
        found |= {"workload": workload.name, "other_work": round(other.fraction(), 3)}
        print(report.row(found), *report.remarks(found), sep="\n", flush=True)
        return found


def in_mib(num_bytes: int | None) -> float | None:
    """Return bytes in MiB."""
    return None if num_bytes is None else round(num_bytes / 2**20, 1)


def prepare(names: Sequence[str], installer: Installer, models: Models) -> list[Server]:
    """Return the servers of the peers that can be had; say in a line each why another cannot."""
    servers = []
    for name in names:
        try:
            servers.append(PEERS[name](installer, models))
        except (PeerError, OSError) as problem:
            print(f"{name} is left out: {problem}", flush=True)
    return servers


async def run(args: argparse.Namespace) -> bool:
    """Install, measure, print; return whether Octavo was measured and answered everything."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    installer = Installer(args.directory.expanduser().absolute(), not args.no_install)
    models = Models(installer, locate_embedded_model().weights_path)
    ours = [octavo(definition) for definition in args.octavo]
    servers = [*ours, *prepare(args.peer, installer, models)]
    if args.install_only:
        return True
    bench = Bench(installer, [WORKLOADS[name] for name in args.workload], models.twin() / "tokenizer.json", args)
    try:
        failed = await bench.measure(servers)
    finally:
        if bench.runs:
            print("", Results(bench.runs).tables(), sep="\n", flush=True)
    is_clean = all(report.is_clean(run.report) for run in bench.runs if run.server.family == OCTAVO)
    return is_clean and not any(server in failed for server in ours)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    octavo_help = f"a format of Octavo: a name, and arguments of `octavo serve`; repeatable (default: {DEFAULT_OCTAVO})"
    parser.add_argument("--octavo", action="append", metavar="NAME=ARGUMENTS", help=octavo_help)
    parser.add_argument("--peer", action="append", choices=PEERS, help="repeat for several (default: all)")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="repeat for several (default: all)")
    parser.add_argument("--rounds", type=positive(int), default=1, help="A B A B ...; medians and ratios at the end")
    parser.add_argument(
        "--directory", type=Path, default=DEFAULT_DIRECTORY, help="environments and weights of the peers"
    )
    parser.add_argument("--rest-s", type=positive(float), default=20.0, help="how long a server is watched at rest")
    parser.add_argument("--out", type=Path, help="file to which the JSON reports are appended, one line each")
    parser.add_argument("--no-install", action="store_true", help="use only the peers that are there")
    parser.add_argument(
        "--install-only", action="store_true", help="install the peers, write their weights, measure nothing"
    )
    args = parser.parse_args(arguments)
    args.octavo = args.octavo or [DEFAULT_OCTAVO]
    args.peer = args.peer or list(PEERS)
    args.workload = args.workload or list(WORKLOADS)
    return args


def main() -> int:
    """Run from the command line; return the exit status."""
    args = parse_arguments()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return 0 if runner.run(run(args)) else 1
    except (OSError, ValueError, PeerError) as problem:
        sys.exit(f"peers.py: {problem}")
    except asyncio.CancelledError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
