"""Measures OpenAI-compatible servers under load: throughput, latency, memory, and whether each answer is as asked.

    python tests/bench/load.py --url http://127.0.0.1:8000 --model smollm2-135m --concurrency 8 --requests 64
    python tests/bench/load.py --url ... --model ... --trace azure_conv.csv.gz --trace-limit 200 --max-context 2048
    python tests/bench/load.py --url A --url B --model ... --rounds 3          (A B A B A B, ratios of medians)

Requests are greedy, streamed, and forced to their output length. The same seed gives the same requests; another seed
gives other text of the same lengths at the same times. Exits with 1 when a request failed or had another length,
when /health failed, or when an answer under load was not the answer alone.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import resource
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import report
import synthetic
import uvloop
from load_client import Outcome, Send, Target, complete, new_session, run_closed_loop, run_open_loop
from server_watch import probe_health, watch_processes
from workloads import Cut, Request, with_tokenizer, write_prompts

from octavo.simulator.traces import Shape, capped, read_trace, scaled

DEFAULT_CONCURRENCY = 8
Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Load:
    """What all servers of a run are asked, and how it arrives (`concurrency` None: at the requests' arrival times)."""

    name: str
    shapes: list[Shape]
    cut: Cut
    concurrency: int | None
    arrivals: str

    async def apply(self, send: Send, requests: list[Request]) -> list[Outcome]:
        if self.concurrency is None:
            return await run_open_loop(send, requests)
        return await run_closed_loop(send, requests, self.concurrency)


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    """Return the shapes that the options ask for."""
    if args.trace:
        shapes = read_trace(args.trace, args.trace_limit)
    elif args.workload == "mixed":
        shapes = synthetic.mixed(args.requests)
    elif args.workload == "shared-prefix":
        shapes = synthetic.shared_prefix(args.requests)
    else:
        shapes = synthetic.fixed(args.requests, args.prompt_tokens, args.output_tokens)
    shapes = [scaled(shape, args.length_scale, args.time_scale) for shape in shapes]
    if args.max_context:
        shapes = [capped(shape, args.max_context) for shape in shapes]
    return synthetic.at_poisson_arrivals(shapes, args.rate) if args.rate else shapes


def load_of(args: argparse.Namespace) -> Load:
    """Return the load that the options ask for."""
    shapes = shapes_of(args)
    name = args.trace.name.partition(".")[0] if args.trace else args.workload
    concurrency, arrivals = args.concurrency, f"C={args.concurrency}"
    if args.compare_alone:
        concurrency, arrivals = len(shapes), f"C={len(shapes)}"
    elif args.rate:
        arrivals = f"{args.rate:g}/s"
    elif args.trace and concurrency is None:
        arrivals = f"trace × {args.time_scale:g}"
    elif concurrency is None:
        concurrency, arrivals = DEFAULT_CONCURRENCY, f"C={DEFAULT_CONCURRENCY}"
    return Load(name, shapes, with_tokenizer(args.tokenizer), concurrency, arrivals)


async def measure(target: Target, load: Load, seed: int, args: argparse.Namespace) -> report.Report:
    """Run the load once against a server and return the report."""
    requests = write_prompts(load.shapes, str(seed), load.cut)
    warm_up = write_prompts(load.shapes[: args.warmup], f"warm-up {seed}", load.cut)
    health_url = f"{target.url}/health" if args.probe_health else None
    async with new_session(target) as session:
        send = functools.partial(complete, session, target)
        await run_closed_loop(send, warm_up, args.warmup)
        async with watch_processes(target.pid) as usage, probe_health(health_url) as health:
            client_before_s, started_s = time.process_time(), time.perf_counter()
            outcomes = await load.apply(send, requests)
            seconds = time.perf_counter() - started_s
            client_cpu_s = time.process_time() - client_before_s
        alone = await run_closed_loop(send, requests, 1) if args.compare_alone else None
    return {
        "label": target.label,
        "workload": load.name,
        "load": load.arrivals,
        "seed": seed,
        **report.summarize(outcomes, seconds),
        "client_cpu_s": round(client_cpu_s, 2),
        **report.describe_processes(usage),
        **report.describe_health(health),
        **(report.compare_answers(outcomes, alone) if alone else {}),
        "command": shlex.join(sys.argv),
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def publish(found: report.Report, out: Path | None) -> None:
    """Print a report as JSON and append it to `out`."""
    line = json.dumps(found)
    print(line, flush=True)
    if out:
        with out.open("a") as file:
            file.write(line + "\n")


async def run(args: argparse.Namespace) -> bool:
    """Measure every server in turn, `rounds` times; print and store; return whether all was clean."""
    targets, load = targets_of(args), load_of(args)
    runs: list[list[report.Report]] = [[] for _ in targets]
    print(report.header())
    for number in range(args.rounds):
        for target, reports in zip(targets, runs, strict=True):
            # A text of its own for each round: nothing of the last one is in a prefix cache.
            reports.append(await measure(target, load, args.seed + number, args))
            print(report.row(reports[-1]), *report.remarks(reports[-1]), sep="\n", flush=True)
    for reports in runs:
        for found in reports:
            publish(found, args.out)
    if len(targets) * args.rounds > 1:
        comparison = report.compare_servers(runs)
        print(report.comparison_table(comparison))
        publish({"comparison": comparison}, args.out)
    return all(report.is_clean(found) for reports in runs for found in reports)


def per_server(name: str, values: Sequence[Value], count: int) -> list[Value]:
    """Spread an option over `count` servers: one value serves all, else each needs its own. Raises ValueError."""
    if len(values) not in (1, count):
        raise ValueError(f"--{name}: {len(values)} values for {count} servers")
    return list(values) * (count if len(values) == 1 else 1)


def targets_of(args: argparse.Namespace) -> list[Target]:
    """Return the servers that the options name, in order."""
    count = len(args.url)
    urls = [url.rstrip("/") for url in args.url]
    models = per_server("model", args.model, count)
    labels = per_server("label", args.label or [chr(ord("A") + index) for index in range(count)], count)
    pids = per_server("pid", args.pid or [None], count)
    return [
        Target(url, model, label, pid, args.chat, args.length_control, args.timeout_s)
        for url, model, label, pid in zip(urls, models, labels, pids, strict=True)
    ]


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """Return an argparse type: a number above 0."""

    def parse(text: str) -> Number:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return parse


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, number = positive(int), positive(float)
    server = parser.add_argument_group("servers (repeat for several; in the same order)")
    server.add_argument("--url", action="append", required=True, help="such as http://127.0.0.1:8000")
    server.add_argument("--model", action="append", required=True, help="its name as the server knows it")
    server.add_argument("--label", action="append", help="name in the report")
    server.add_argument("--pid", action="append", type=int, help="root of its process tree: memory and CPU time")
    server.add_argument("--chat", action="store_true", help="use /v1/chat/completions")
    server.add_argument("--length-control", choices=("ignore_eos", "min_tokens", "none"), default="ignore_eos")
    server.add_argument("--timeout-s", type=number, default=600.0, help="time that a request may take")
    what = parser.add_argument_group("requests")
    what.add_argument("--workload", choices=("mixed", "shared-prefix", "fixed"), default="mixed")
    what.add_argument("--requests", type=count, default=64, help="how many, without --trace")
    what.add_argument("--prompt-tokens", type=count, default=256, help="of --workload fixed")
    what.add_argument("--output-tokens", type=count, default=128, help="of --workload fixed")
    what.add_argument("--trace", type=Path, help="replay an Azure (.csv.gz) or Mooncake (.jsonl.gz) trace")
    what.add_argument("--trace-limit", type=count, help="its first N requests only")
    what.add_argument("--length-scale", type=number, default=1.0, help="factor for prompt and output lengths")
    what.add_argument("--max-context", type=count, help="cap prompt + output tokens of a request")
    what.add_argument("--tokenizer", help="tokenizer.json, for exact prompt lengths")
    what.add_argument("--seed", type=int, default=0)
    when = parser.add_argument_group("arrivals (default: the trace's, or 8 in flight)")
    when.add_argument("--concurrency", type=count, help="so many in flight (closed loop)")
    when.add_argument("--rate", type=number, help="so many a second (Poisson, open loop)")
    when.add_argument("--time-scale", type=number, default=1.0, help="factor for the trace's arrival times")
    how = parser.add_argument_group("run")
    how.add_argument("--rounds", type=count, default=1, help="A B A B ...; medians and ratios at the end")
    how.add_argument("--warmup", type=int, default=4, help="requests before each run that do not count")
    how.add_argument("--probe-health", action="store_true", help="measure GET /health meanwhile, from another process")
    how.add_argument("--compare-alone", action="store_true", help="send all at once, then one at a time; compare texts")
    how.add_argument("--out", type=Path, help="file to which the JSON reports are appended, one line each")
    args = parser.parse_args(arguments)
    if args.rate and args.concurrency:
        parser.error("--rate and --concurrency exclude each other")
    if args.compare_alone and args.rate:
        parser.error("--compare-alone sends all at once; leave --rate out")
    if args.max_context == 1:
        parser.error("--max-context must leave room for a prompt and an output token")
    return args


def main() -> int:
    """Run from the command line; return the exit status."""
    args = parse_arguments()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # a socket for every request in flight
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return 0 if runner.run(run(args)) else 1
    except (OSError, ValueError) as problem:
        sys.exit(f"load.py: {problem}")


if __name__ == "__main__":
    sys.exit(main())
