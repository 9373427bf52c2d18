"""How the command line is read: parsers of text, help, and errors of one line that name the flag.

What the flags are is the table in `flags`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import msgspec

from octavo.api_server.flags import FLAGS, KV_SIZE_FLAGS, METAVARS, SECTIONS, Flag
from octavo.api_server.model_directory import parse_default_sampling
from octavo.protocol.config import Config, DefaultSampling, Dtype, EngineConfig, ModelConfig, Quantization
from octavo.protocol.lifecycle import ExitCode

UNIT_BYTES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
MAX_NAME_LENGTH = 256
MAX_GIB = 2**20
MODEL_ENGINE, REPLAY_ENGINE = "model", "replay"  # values of --engine
DEFAULT_MODEL = "smollm2-135m"

SERVE_DESCRIPTION = (
    "MODEL is a directory with config.json, safetensors and tokenizer.json; a .gguf file; a hub id such as "
    "HuggingFaceTB/SmolLM2-135M-Instruct; or smollm2-135m, the small default model. SIGTERM lets running requests "
    "finish, Ctrl-C does not."
)


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
    cluster_key = commands.add_parser(
        "cluster-key", help="write a new secret for --cluster-key-file", allow_abbrev=False
    )
    cluster_key.add_argument("file", metavar="FILE", type=Path, help="new file; give every node a copy")
    commands.add_parser("bench", help="measure a running server", add_help=False)
    commands.add_parser("chat", help="talk to a running server", add_help=False)
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
    serve.add_argument(
        "model", metavar="MODEL", help="directory, .gguf file, hub id or smollm2-135m; a script with --engine replay"
    )
    serve.add_argument(
        "--engine",
        choices=[MODEL_ENGINE, REPLAY_ENGINE],
        default=MODEL_ENGINE,
        help="what answers: the model, or for tests of clients a script of JSON lines, which MODEL is then "
        "(default: %(default)s)",
    )
    serve.add_argument(
        "--replay-model",
        metavar="MODEL",
        help="with --engine replay, the model whose tokenizer and chat template are used; its weights are not read "
        f"(default: {DEFAULT_MODEL})",
    )
    serve.add_argument(
        "--served-model-name",
        action="append",
        type=_served_model_name,
        metavar="NAME",
        help="name that clients use; may be given several times, answers carry the first (default: MODEL)",
    )
    serve.add_argument("--dtype", choices=["auto", *map(str, Dtype)], default="auto", help="format of weights and KV")
    serve.add_argument(
        "--quantization",
        type=_checked_type(Quantization),
        default=default_of(ModelConfig, "quantization"),
        metavar="FORMAT",
        help="how the weights are held" + _choices_text(Quantization) + "; auto: as the file holds them where the "
        "device multiplies that, but as numbers with --dtype float32 (default: %(default)s)",
    )
    serve.add_argument(
        "--max-model-len",
        type=_checked_type(get_type_hints(ModelConfig, include_extras=True)["max_model_len"]),
        metavar="TOKENS",
        help="longest prompt and output together (default: what the model was made for)",
    )
    serve.add_argument(
        "--generation-config",
        choices=["auto", "none"],
        default="auto",
        help="what a request gets where it says nothing about sampling: auto: what the model's generation_config.json "
        "says; none: the API's own defaults (default: %(default)s)",
    )
    serve.add_argument(
        "--override-generation-config",
        type=_default_sampling,
        metavar="JSON",
        default=DefaultSampling(),
        help=f"JSON object that goes before both, of {', '.join(DefaultSampling.__struct_fields__)}",
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
        help=flag.help + _choices_text(flag.type) + ("" if default in (None, ()) else f" (default: {default})"),
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
    if flag.field.endswith("_origins"):
        return _origins(flag.type)
    return _existing_file if flag.field.endswith("_file") else _checked_type(flag.type)


def _add_other_flags(serve: Parser) -> None:
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


def _origins(field_type: Any) -> Callable[[str], Any]:
    """Return a parser of origins with commas between them."""

    def parse(text: str) -> Any:
        try:
            return msgspec.convert(text.split(","), type=field_type)
        except msgspec.ValidationError as problem:
            rule = "must be * or origins such as https://chat.example with commas between them"
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}") from problem

    return parse


def _default_sampling(text: str) -> DefaultSampling:
    try:
        return parse_default_sampling(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{problem}") from problem


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
