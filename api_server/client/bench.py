"""`octavo bench`: the command line. What it does is in `bench_run`, which is imported only after the flags are read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from octavo.api_server.client.flags import DEFAULT_URL, INTERRUPTED, add_api_key_flag
from octavo.api_server.options import Parser
from octavo.protocol.lifecycle import ExitCode

DEFAULT_CONCURRENCY = 8
DEFAULT_NUM_REQUESTS = 64
DEFAULT_OUTPUT_TOKENS = 128
DESCRIPTION = """Measure a running server with OpenAI's API: latencies, tokens per second, errors. Requests are greedy
and streamed, and those of made-up workloads forced to their output length. Tokens are counted by the server (usage).
The exit status is 1 when a request failed or had another length than asked."""

Number = TypeVar("Number", int, float)


def main(arguments: Sequence[str], api_key: str | None) -> int:
    """Run the command; return the exit status. `api_key` is the environment's."""
    parser = build_parser(api_key)
    args = parser.parse_args(arguments)
    check_arrivals(parser, args)
    from octavo.api_server.client.bench_run import run_command  # needs aiohttp and a tokenizer's library

    try:
        return run_command(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError) as problem:
        print(f"octavo: error: {problem}", file=sys.stderr)  # noqa: T201
        return ExitCode.FAILURE


def build_parser(api_key: str | None) -> Parser:
    """The command line of `octavo bench`."""
    parser = Parser(prog="octavo bench", description=DESCRIPTION, allow_abbrev=False)
    server = parser.add_argument_group("server")
    server.add_argument("--url", default=DEFAULT_URL, help="where it listens (default: %(default)s)")
    server.add_argument("--model", required=True, help="its name as the server knows it")
    add_api_key_flag(server, api_key)
    add_endpoint_flags(server)
    what = parser.add_argument_group("requests")
    add_request_flags(what)
    what.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="instead of made-up text: lines of JSON with prompt or messages, and max_tokens if it is not "
        "--output-tokens; answers may be shorter. --requests takes its first N lines (default: all)",
    )
    when = parser.add_argument_group(f"arrivals (default: {DEFAULT_CONCURRENCY} in flight)")
    add_arrival_flags(when)
    how = parser.add_argument_group("run")
    add_run_flags(how)
    how.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as a JSON object")
    return parser


def add_endpoint_flags(server: Any) -> None:
    """Add the flags that say how a server is asked."""
    server.add_argument("--chat", action="store_true", help="use /v1/chat/completions")
    server.add_argument(
        "--length-control",
        choices=("ignore_eos", "min_tokens", "none"),
        help="how the length of the output is forced (default: ignore_eos)",
    )
    server.add_argument(
        "--timeout-s", type=positive(float), default=600.0, metavar="S", help="time that a request may take"
    )


def add_request_flags(what: Any) -> None:
    """Add the flags that say what is asked."""
    count = positive(int)
    what.add_argument(
        "--workload",
        choices=("mixed", "shared-prefix", "fixed"),
        default="mixed",
        help="mixed: prompts around 220 tokens and outputs around 120; shared-prefix: 1,000 tokens in common, 30 of "
        "their own, 64 of output; fixed: --prompt-tokens and --output-tokens (default: %(default)s)",
    )
    what.add_argument("--requests", type=count, metavar="N", help=f"how many (default: {DEFAULT_NUM_REQUESTS})")
    what.add_argument(
        "--prompt-tokens", type=count, default=256, metavar="N", help="of --workload fixed (default: %(default)s)"
    )
    what.add_argument(
        "--output-tokens",
        type=count,
        default=DEFAULT_OUTPUT_TOKENS,
        metavar="N",
        help="of --workload fixed (default: %(default)s)",
    )
    what.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json, for exact prompt lengths; without it, about right"
    )
    what.add_argument(
        "--seed", type=int, default=0, metavar="N", help="another one gives other text of the same lengths"
    )


def add_arrival_flags(when: Any) -> None:
    """Add the flags that say when it is asked."""
    when.add_argument("--concurrency", type=positive(int), metavar="N", help="so many in flight (closed loop)")
    when.add_argument("--rate", type=positive(float), metavar="N", help="so many a second (Poisson, open loop)")


def add_run_flags(how: Any) -> None:
    """Add the flags about a run as a whole."""
    how.add_argument(
        "--warmup",
        type=natural,
        default=4,
        metavar="N",
        help="requests before that do not count (default: %(default)s)",
    )


def check_arrivals(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check what excludes each other; ends with a usage error."""
    if args.rate and args.concurrency:
        parser.error("argument --rate: excludes --concurrency")


def natural(text: str) -> int:
    """Parse a whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on, got {text!r}")
    return int(text)


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """Return an argparse type: a number above 0."""

    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = kind("0")
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
        return value

    return parse
