"""A load: requests, and how they arrive; sent to a server, timed, and put into figures."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import resource
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import uvloop

from octavo.api_server.client import shapes
from octavo.api_server.client.bench import DEFAULT_CONCURRENCY, DEFAULT_NUM_REQUESTS
from octavo.api_server.client.load_client import (
    Outcome,
    Send,
    Target,
    complete,
    new_session,
    run_closed_loop,
    run_open_loop,
)
from octavo.api_server.client.load_report import Report, is_clean, summarize, tables
from octavo.api_server.client.terminal_text import safe
from octavo.api_server.client.workloads import (
    FileWorkload,
    Request,
    ShapedWorkload,
    Workload,
    read_prompts,
    with_tokenizer,
)
from octavo.protocol.lifecycle import ExitCode

Result = TypeVar("Result")


@dataclass(frozen=True)
class Load:
    """What a server is asked, and how it arrives (`concurrency` None: at the requests' arrival times)."""

    workload: Workload
    concurrency: int | None
    arrivals: str

    async def apply(self, send: Send, requests: Sequence[Request]) -> list[Outcome]:
        if self.concurrency is None:
            return await run_open_loop(send, requests)
        return await run_closed_loop(send, requests, self.concurrency)


@dataclass(frozen=True)
class TimedRun:
    """A load that was applied: outcomes in the order of the requests, how long it took, and the CPU time it took us."""

    outcomes: list[Outcome]
    seconds: float
    client_cpu_s: float


def run_command(args: argparse.Namespace) -> int:
    """Measure as the flags say, print tables, write JSON; return the exit status. Raises OSError and ValueError."""
    load = load_of(args)
    found = run_in_loop(measure(load, target_of(args, load.workload), args.seed, args.warmup))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if found["errors"] == found["requests"]:
        raise ValueError(f"{found['url']} answered no request; the first fault: {safe(found['first_error'])}")
    print(safe(tables(found)))  # noqa: T201 - the command's result
    return ExitCode.OK if is_clean(found) else ExitCode.FAILURE


def run_in_loop(work: Coroutine[None, None, Result]) -> Result:
    """Run `work` to its end, with as many open sockets as the system lets us have."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))  # a socket for every request in flight
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def measure(load: Load, target: Target, seed: int, num_warm_up: int) -> Report:
    """Apply `load` once; return the figures."""
    async with warmed_up(load, target, seed, num_warm_up) as send:
        run = await timed(load, send, load.workload.requests(str(seed)))
    return {
        "url": target.url,
        "model": target.model,
        "workload": load.workload.name,
        "load": load.arrivals,
        "seed": seed,
        **summarize(run.outcomes, run.seconds),
        "client_cpu_s": round(run.client_cpu_s, 2),
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


@asynccontextmanager
async def warmed_up(load: Load, target: Target, seed: int, num_warm_up: int) -> AsyncIterator[Send]:
    """Yield the function that sends, after the warm-up."""
    requests = load.workload.warm_up(str(seed), num_warm_up)
    async with new_session(target) as session:
        send = functools.partial(complete, session, target)
        await run_closed_loop(send, requests, num_warm_up)
        yield send


async def timed(load: Load, send: Send, requests: Sequence[Request]) -> TimedRun:
    """Apply `load` and take the time."""
    client_before_s, started_s = time.process_time(), time.perf_counter()
    outcomes = await load.apply(send, requests)
    seconds = time.perf_counter() - started_s
    return TimedRun(outcomes, seconds, time.process_time() - client_before_s)


def load_of(args: argparse.Namespace) -> Load:
    """Return the load that the flags ask for. Raises OSError and ValueError."""
    if args.rate:
        concurrency, arrivals = None, f"{args.rate:g}/s"
    else:
        concurrency = args.concurrency or DEFAULT_CONCURRENCY
        arrivals = f"C={concurrency}"
    if args.prompts is not None:
        workload: Workload = read_prompts(args.prompts, args.requests, args.output_tokens, args.rate)
        return Load(workload, concurrency, arrivals)
    found = made_up_shapes(args)
    if args.rate:
        found = shapes.at_poisson_arrivals(found, args.rate)
    return Load(ShapedWorkload(args.workload, found, with_tokenizer(args.tokenizer)), concurrency, arrivals)


def made_up_shapes(args: argparse.Namespace) -> list[shapes.Shape]:
    """Return the shapes of the workload that the flags name."""
    count = args.requests or DEFAULT_NUM_REQUESTS
    if args.workload == "mixed":
        return shapes.mixed(count)
    if args.workload == "shared-prefix":
        return shapes.shared_prefix(count)
    return shapes.fixed(count, args.prompt_tokens, args.output_tokens)


def target_of(args: argparse.Namespace, workload: Workload) -> Target:
    """Return the server that the flags name. Answers to somebody's own prompts may end by themselves."""
    file = workload if isinstance(workload, FileWorkload) else None
    return Target(
        args.url.rstrip("/").removesuffix("/v1"),
        args.model,
        label=args.model,
        is_chat=args.chat or (file is not None and file.is_chat),
        length_control=args.length_control or ("ignore_eos" if file is None else "none"),
        timeout_s=args.timeout_s,
        api_key=args.api_key,
    )
