"""Measures OpenAI-compatible servers side by side: throughput, latency, memory, and whether each answer is as asked.

    python tests/bench/load.py --url http://127.0.0.1:8000 --model smollm2-135m --concurrency 8 --requests 64
    python tests/bench/load.py --url ... --model ... --trace azure_conv.csv.gz --trace-limit 200 --max-context 2048
    python tests/bench/load.py --url A --url B --model ... --rounds 3          (A B A B A B, ratios of medians)

The requests and the client are those of `octavo bench`; this adds traces, several servers in turn, and what can be seen
of a server from outside. Requests are greedy, streamed, and forced to their output length. The same seed gives the same
requests; another seed gives other text of the same lengths at the same times. Exits with 1 when a request failed or had
another length, when /health failed, or when an answer under load was not the answer alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import report
from server_watch import probe_health, watch_processes

from octavo.api_server.client import bench, shapes
from octavo.api_server.client.bench import DEFAULT_CONCURRENCY
from octavo.api_server.client.bench_run import Load, made_up_shapes, run_in_loop, timed, warmed_up
from octavo.api_server.client.load_client import Target, run_closed_loop
from octavo.api_server.client.load_report import Report, summarize
from octavo.api_server.client.workloads import ShapedWorkload, with_tokenizer
from octavo.simulator.traces import capped, read_trace, scaled

Value = TypeVar("Value")


def shapes_of(args: argparse.Namespace) -> list[shapes.Shape]:
    """Return the shapes that the options ask for."""
    found = read_trace(args.trace, args.trace_limit) if args.trace else made_up_shapes(args)
    found = [scaled(shape, args.length_scale, args.time_scale) for shape in found]
    if args.max_context:
        found = [capped(shape, args.max_context) for shape in found]
    return shapes.at_poisson_arrivals(found, args.rate) if args.rate else found


def load_of(args: argparse.Namespace) -> Load:
    """Return the load that the options ask for."""
    found = shapes_of(args)
    name = args.trace.name.partition(".")[0] if args.trace else args.workload
    concurrency, arrivals = args.concurrency, f"C={args.concurrency}"
    if args.compare_alone:
        concurrency, arrivals = len(found), f"C={len(found)}"
    elif args.rate:
        arrivals = f"{args.rate:g}/s"
    elif args.trace and concurrency is None:
        arrivals = f"trace × {args.time_scale:g}"
    elif concurrency is None:
        concurrency, arrivals = DEFAULT_CONCURRENCY, f"C={DEFAULT_CONCURRENCY}"
    return Load(ShapedWorkload(name, found, with_tokenizer(args.tokenizer)), concurrency, arrivals)


async def measure(target: Target, load: Load, seed: int, args: argparse.Namespace) -> Report:
    """Run the load once against a server and return the report."""
    requests = load.workload.requests(str(seed))
    health_url = f"{target.url}/health" if args.probe_health else None
    async with warmed_up(load, target, seed, args.warmup) as send:
        async with watch_processes(target.pid) as usage, probe_health(health_url) as health:
            run = await timed(load, send, requests)
        alone = await run_closed_loop(send, requests, 1) if args.compare_alone else None
    return {
        "label": target.label,
        "workload": load.workload.name,
        "load": load.arrivals,
        "seed": seed,
        **summarize(run.outcomes, run.seconds),
        "client_cpu_s": round(run.client_cpu_s, 2),
        **report.describe_processes(usage),
        **report.describe_health(health),
        **(report.compare_answers(run.outcomes, alone) if alone else {}),
        "command": shlex.join(sys.argv),
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def publish(found: Report, out: Path | None) -> None:
    """Print a report as JSON and append it to `out`."""
    line = json.dumps(found)
    print(line, flush=True)
    if out:
        with out.open("a") as file:
            file.write(line + "\n")


async def run(args: argparse.Namespace) -> bool:
    """Measure every server in turn, `rounds` times; print and store; return whether all was clean."""
    targets, load = targets_of(args), load_of(args)
    runs: list[list[Report]] = [[] for _ in targets]
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
        Target(url, model, label, pid, args.chat, args.length_control or "ignore_eos", args.timeout_s)
        for url, model, label, pid in zip(urls, models, labels, pids, strict=True)
    ]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, number = bench.positive(int), bench.positive(float)
    server = parser.add_argument_group("servers (repeat for several; in the same order)")
    server.add_argument("--url", action="append", required=True, help="such as http://127.0.0.1:8000")
    server.add_argument("--model", action="append", required=True, help="its name as the server knows it")
    server.add_argument("--label", action="append", help="name in the report")
    server.add_argument("--pid", action="append", type=int, help="root of its process tree: memory and CPU time")
    bench.add_endpoint_flags(server)
    what = parser.add_argument_group("requests")
    bench.add_request_flags(what)
    what.add_argument("--trace", type=Path, help="replay an Azure (.csv.gz) or Mooncake (.jsonl.gz) trace")
    what.add_argument("--trace-limit", type=count, help="its first N requests only")
    what.add_argument("--length-scale", type=number, default=1.0, help="factor for prompt and output lengths")
    what.add_argument("--max-context", type=count, help="cap prompt + output tokens of a request")
    when = parser.add_argument_group("arrivals (default: the trace's, or 8 in flight)")
    bench.add_arrival_flags(when)
    when.add_argument("--time-scale", type=number, default=1.0, help="factor for the trace's arrival times")
    how = parser.add_argument_group("run")
    bench.add_run_flags(how)
    how.add_argument("--rounds", type=count, default=1, help="A B A B ...; medians and ratios at the end")
    how.add_argument("--probe-health", action="store_true", help="measure GET /health meanwhile, from another process")
    how.add_argument("--compare-alone", action="store_true", help="send all at once, then one at a time; compare texts")
    how.add_argument("--out", type=Path, help="file to which the JSON reports are appended, one line each")
    args = parser.parse_args(arguments)
    bench.check_arrivals(parser, args)
    if args.compare_alone and args.rate:
        parser.error("--compare-alone sends all at once; leave --rate out")
    if args.max_context == 1:
        parser.error("--max-context must leave room for a prompt and an output token")
    return args


def main() -> int:
    """Run from the command line; return the exit status."""
    args = parse_arguments()
    try:
        return 0 if run_in_loop(run(args)) else 1
    except (OSError, ValueError) as problem:
        sys.exit(f"load.py: {problem}")


if __name__ == "__main__":
    sys.exit(main())
