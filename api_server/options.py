"""The flags of `octavo serve`: each is one field of the config, which also gives its default and its check.

Invariant: a flag that is not given leaves the config's own default, so there is one place for defaults.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_type_hints

import msgspec

from octavo.protocol.config import (
    ApiConfig,
    CacheConfig,
    Config,
    Dtype,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from octavo.protocol.lifecycle import ExitCode

UNIT_BYTES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
MAX_NAME_LENGTH = 256
METAVARS = {  # by the last word of a field's name, which is its unit where it has one
    "host": "HOST",
    "s": "SECONDS",
    "bytes": "BYTES",
    "utilization": "SHARE",
    "share": "SHARE",
    "policy": "POLICY",
    "mode": "MODE",
    "file": "FILE",
}
MAX_GIB = 2**20


SERVE_DESCRIPTION = (
    "MODEL is a directory with config.json, safetensors and tokenizer.json; a .gguf file; a hub id such as "
    "HuggingFaceTB/SmolLM2-135M-Instruct; or smollm2-135m, the small default model. SIGTERM lets running requests "
    "finish, Ctrl-C does not."
)


class Flag(NamedTuple):
    """One flag: `section.field` of EngineConfig. A boolean field has no value on the command line."""

    names: tuple[str, ...]
    section: str
    field: str
    help: str

    @property
    def type(self) -> Any:
        """Type of the field, with its bounds."""
        return get_type_hints(SECTIONS[self.section], include_extras=True)[self.field]


FLAGS = (
    Flag(("--host",), "api", "host", "address to listen on"),
    Flag(("--port",), "api", "port", "port to listen on; 0 takes a free one"),
    Flag(("--max-num-seqs",), "scheduler", "max_num_seqs", "requests that may hold KV memory at a time"),
    Flag(
        ("--max-num-batched-tokens",),
        "scheduler",
        "max_num_batched_tokens",
        "token budget: tokens that one step computes over all requests",
    ),
    Flag(
        ("--max-tokens-per-request",),
        "scheduler",
        "max_tokens_per_request",
        "tokens that one step computes for one request, the chunk of chunked prefill; default: the token budget",
    ),
    Flag(
        ("--max-steps-in-flight",),
        "scheduler",
        "max_steps_in_flight",
        "2 sends a step before the result of the previous one is back; 1 is the plain loop",
    ),
    Flag(("--scheduling-policy",), "scheduler", "scheduling_policy", "who is admitted next"),
    Flag(("--admission-policy",), "scheduler", "admission_policy", "when one more request fits"),
    Flag(
        ("--preemption-mode",),
        "scheduler",
        "preemption_mode",
        "what happens to the KV of a preempted request; auto takes what is cheaper by the worker's measured speeds",
    ),
    Flag(
        ("--max-prefill-share",),
        "scheduler",
        "max_prefill_share",
        "share of the token budget that prompts may take while others decode; less bounds how much they slow them down",
    ),
    Flag(
        ("--max-preemptions-per-request",),
        "scheduler",
        "max_preemptions_per_request",
        "after so many a request is admitted only when it will not be preempted again",
    ),
    Flag(("--block-size",), "cache", "block_size", "tokens per KV block"),
    Flag(
        ("--enable-prefix-caching",),
        "cache",
        "enable_prefix_caching",
        "share the KV blocks of equal beginnings (default), or not",
    ),
    Flag(
        ("--swap-space-gib",),
        "cache",
        "swap_space_bytes",
        "host memory in GiB to which the KV blocks of preempted requests are copied",
    ),
    Flag(
        ("--kv-offload-gib",),
        "cache",
        "kv_offload_bytes",
        "host memory in GiB for KV blocks that the prefix cache would drop",
    ),
    Flag(
        ("--num-host-blocks",),
        "cache",
        "num_host_blocks",
        "exact number of host blocks instead of what the two sizes hold, for experiments",
    ),
    Flag(
        ("--check-swapped-blocks",),
        "cache",
        "check_swapped_blocks",
        "keep a checksum of every block on the host and compare it when the block comes back",
    ),
    Flag(
        ("--memory-utilization", "--gpu-memory-utilization"),
        "cache",
        "memory_utilization",
        "share of the memory left after weights and the largest step that KV blocks take",
    ),
    Flag(("--threads",), "parallel", "num_threads", "CPU threads of a worker; default: its share of the cores"),
    Flag(
        ("--max-queued-requests",),
        "api",
        "max_queued_requests",
        "requests that may wait beyond --max-num-seqs; more are refused with 429",
    ),
    Flag(
        ("--max-queued-tokens",),
        "api",
        "max_queued_tokens",
        "prompt tokens of requests without output, more are refused with 429; default: four times the KV memory",
    ),
    Flag(
        ("--api-key-file",),
        "api",
        "api_key_file",
        "TOML file with the API keys, one [[key]] with name, key or key_sha256, and weight each; default: no keys",
    ),
    Flag(("--log-requests",), "api", "log_requests", "log one line per request, never its text"),
    Flag(("--request-timeout",), "api", "request_timeout_s", "longest life of a request in seconds"),
    Flag(
        ("--drain-grace",),
        "api",
        "drain_grace_s",
        "seconds after SIGTERM in which new requests are still taken, while /ready already says 503",
    ),
    Flag(("--drain-timeout",), "api", "drain_timeout_s", "seconds after that for running requests to finish"),
)
KV_SIZE_FLAGS = (
    Flag(("--kv-cache-memory",), "cache", "kv_cache_bytes", "exact size of the KV memory, such as 512MiB or 2GiB"),
    Flag(("--num-device-blocks",), "cache", "num_device_blocks", "exact number of KV blocks, for experiments"),
)
SECTIONS: dict[str, type[Config]] = {
    "api": ApiConfig,
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "parallel": ParallelConfig,
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(ExitCode.USAGE, f"octavo: error: {message} (see {self.prog} --help)\n")


def build_parser() -> Parser:
    """The command line; nothing here is slow to import."""
    parser = Parser(prog="octavo", description="Serve a large language model over the OpenAI API.", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser("serve", help="start the server", description=SERVE_DESCRIPTION, allow_abbrev=False)
    _add_model_flags(serve)
    for flag in FLAGS:
        _add_flag(serve, flag)
    kv_size = serve.add_mutually_exclusive_group()
    for flag in KV_SIZE_FLAGS:
        _add_flag(kv_size, flag)
    _add_other_flags(serve)
    commands.add_parser("simulate", help="replay a trace with the real scheduler and a cost model", add_help=False)
    return parser


def sections_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the `api`, `scheduler`, `cache` and `parallel` parts of the config that the flags ask for."""
    given: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for dotted, value in vars(arguments).items():
        section, _, field = dotted.partition(".")
        if field:
            given[section][field] = value
    return {section: config(**given[section]) for section, config in SECTIONS.items()}


def in_words_of_flags(problem: str) -> str:
    """Return `problem` with the names of flags instead of those of fields."""
    for flag in (*FLAGS, *KV_SIZE_FLAGS):
        problem = re.sub(rf"\b{flag.field}\b", flag.names[0], problem)
    return problem


def default_of(config: type[Config], field: str) -> Any:
    """Return the default that `config` gives to `field`."""
    return next(each.default for each in msgspec.structs.fields(config) if each.name == field)


def _add_model_flags(serve: Parser) -> None:
    serve.add_argument("model", metavar="MODEL", help="directory, .gguf file, hub id or smollm2-135m")
    serve.add_argument(
        "--served-model-name",
        action="append",
        type=_served_model_name,
        metavar="NAME",
        help="name that clients use; may be given several times, answers carry the first (default: MODEL)",
    )
    serve.add_argument("--dtype", choices=["auto", *map(str, Dtype)], default="auto", help="format of weights and KV")
    serve.add_argument(
        "--max-model-len",
        type=_checked_type(get_type_hints(ModelConfig, include_extras=True)["max_model_len"]),
        metavar="TOKENS",
        help="longest prompt and output together (default: what the model was made for)",
    )


def _add_flag(container: Any, flag: Flag) -> None:
    default = default_of(SECTIONS[flag.section], flag.field)
    options: dict[str, Any] = {"dest": f"{flag.section}.{flag.field}", "default": argparse.SUPPRESS}
    if flag.type is bool:
        action = argparse.BooleanOptionalAction if default else "store_true"
        container.add_argument(*flag.names, action=action, help=flag.help, **options)
        return
    container.add_argument(
        *flag.names,
        type=_parser_of(flag),
        metavar="N" if flag.names[0].endswith("-gib") else METAVARS.get(flag.field.rsplit("_", 1)[-1], "N"),
        help=flag.help + _choices_text(flag.type) + ("" if default is None else f" (default: {default})"),
        **options,
    )


def _choices_text(field_type: Any) -> str:
    is_choice = isinstance(field_type, type) and issubclass(field_type, StrEnum)
    return f": {', '.join(field_type)}" if is_choice else ""


def _parser_of(flag: Flag) -> Callable[[str], Any]:
    if flag.names[0].endswith("-gib"):
        return _gib
    if flag.field.endswith("_bytes"):
        return _num_bytes
    return _existing_file if flag.field.endswith("_file") else _checked_type(flag.type)


def _add_other_flags(serve: Parser) -> None:
    serve.add_argument(
        "--tensor-parallel-size",
        dest="parallel.tensor_parallel_size",
        type=_tensor_parallel_size,
        default=argparse.SUPPRESS,
        metavar="N",
        help="devices that share the model; this version takes only 1",
    )
    serve.add_argument("--cache-dir", metavar="DIR", help="where downloads and imports go (default: ~/.cache/octavo)")
    serve.add_argument(
        "--insecure-public-bind",
        action="store_true",
        help="allow a --host that is not loopback although there is no API key: whoever reaches it can use it",
    )
    serve.add_argument(
        "--worker-module",
        default=default_of(EngineConfig, "worker_module"),
        metavar="MODULE",
        help="module that runs as the worker, for tests of the server itself (default: %(default)s)",
    )


def _checked_type(field_type: Any) -> Callable[[str], Any]:
    """Return a parser of text with the bounds or choices of `field_type`."""
    choices = _choices_text(field_type)

    def parse(text: str) -> Any:
        try:
            return msgspec.convert(text, type=field_type, strict=False)
        except msgspec.ValidationError as problem:
            rule = str(problem).split(", got")[0].replace("`", "").replace("Expected", "must be")
            rule = f"must be one of{choices[1:]}" if choices else rule
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}") from problem

    return parse


def _gib(text: str) -> int:
    number = float(text) if re.fullmatch(r"\d{1,15}(?:\.\d{1,6})?", text) else -1.0
    if not 0 <= number <= MAX_GIB:
        raise argparse.ArgumentTypeError(f"must be a number of GiB such as 0, 0.5 or 16, got {text!r}")
    return int(number * UNIT_BYTES["GiB"])


def _existing_file(text: str) -> str:
    path = Path(text).absolute()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"must be a file, got {text!r}")
    return str(path)


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]iB)?", text)
    num_bytes = int(float(match[1]) * UNIT_BYTES[match[2] or ""]) if match else 0
    if num_bytes < 1:
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 536870912, 512MiB or 2GiB, got {text!r}")
    return num_bytes


def _served_model_name(text: str) -> str:
    if not text.strip() or len(text) > MAX_NAME_LENGTH or not text.isprintable():
        raise argparse.ArgumentTypeError(f"must be 1 to {MAX_NAME_LENGTH} printable characters")
    return text


def _tensor_parallel_size(text: str) -> int:
    if text != "1":
        raise argparse.ArgumentTypeError(f"must be 1: this version runs a model on one device, got {text!r}")
    return 1
