"""The `octavo` command: flags in, one frozen config out, then the supervisor.

Nothing else reads flags or the environment. Invariant: importing this is quick and starts nothing, so `--help` and a
usage error answer at once. Exit codes are those of `protocol.lifecycle.ExitCode`; a server that was asked to stop ends
with 0, whenever that was.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from octavo.api_server.api_keys import load_api_keys
from octavo.api_server.child_process import module_command
from octavo.api_server.client.flags import API_KEY_VARIABLE
from octavo.api_server.device_detection import detect_device
from octavo.api_server.model_source import ModelRequest, default_served_name, resolve_model
from octavo.api_server.network import worker_environment
from octavo.api_server.options import (
    DEFAULT_MODEL,
    REPLAY_ENGINE,
    Parser,
    build_parser,
    in_words_of_flags,
    sections_of,
)
from octavo.api_server.owned_directory import OwnedDirectory
from octavo.api_server.startup_log import StartupLog, open_missing_standard_streams
from octavo.api_server.stop_signals import HelperRunner, SignalInbox, StopRequestedError
from octavo.api_server.supervisor import Supervisor, process_specs
from octavo.protocol.config import (
    GPU_MAX_NUM_BATCHED_TOKENS,
    ApiConfig,
    CacheConfig,
    DeviceKind,
    Dtype,
    EngineConfig,
    KvCacheDtype,
    ParallelConfig,
    PreemptionMode,
    Quantization,
    SchedulerConfig,
)
from octavo.protocol.lifecycle import ExitCode, StartupError

MAX_SERVED_NAMES = 32  # with their longest length a Launch still fits into an empty pipe, so no write waits
IPC_PREFIX = "octavo-ipc-"
MAX_SOCKET_PATH_BYTES = 107  # sun_path of unix(7), less its end
LONGEST_SOCKET_NAME = "/engine"
SIMULATOR = "octavo.simulator"
CLIENTS = {  # commands for running servers
    "bench": "octavo.api_server.client.bench",
    "chat": "octavo.api_server.client.chat",
}
REPLAY_WORKER = "octavo.worker.replay"


def main() -> None:
    """Entry point of the `octavo` command."""
    open_missing_standard_streams()
    if sys.argv[1:2] == ["simulate"]:
        simulate(sys.argv[2:])
    if sys.argv[1:] and sys.argv[1] in CLIENTS:
        sys.exit(run_client(sys.argv[1], sys.argv[2:]))
    parser = build_parser()
    arguments = parser.parse_args()
    if arguments.version:
        print(f"octavo {metadata.version('octavo')}")  # noqa: T201 - what the flag asks for
        sys.exit(ExitCode.OK)
    if arguments.command is None:
        parser.error("no command given; try: octavo serve smollm2-135m")
    if arguments.command == "cluster-key":
        sys.exit(run_guarded(lambda signals, log: make_cluster_key(arguments.file, log)))
    parser.prog = "octavo serve"  # whose flags the next complaints are about
    choose_engine(parser, arguments)
    choose_device(arguments)
    check_arguments(parser, arguments)
    sys.exit(serve(arguments))


def simulate(arguments: Sequence[str]) -> NoReturn:
    """Become the simulator, which has flags of its own."""
    if find_spec(SIMULATOR) is None:
        print("octavo: error: the simulator is not installed with this server", file=sys.stderr)  # noqa: T201
        sys.exit(ExitCode.FAILURE)
    command = (*module_command(SIMULATOR), *arguments)
    os.execv(command[0], command)  # noqa: S606 - no shell


def run_client(command: str, arguments: Sequence[str]) -> int:
    """Run a command that talks to a server; it has flags of its own and is imported only now."""
    return int(import_module(CLIENTS[command]).main(arguments, os.environ.get(API_KEY_VARIABLE)))


def choose_engine(parser: Parser, arguments: argparse.Namespace) -> None:
    """With --engine replay, put the model whose words are used where the script stands; ends with a usage error."""
    arguments.replay_script = None
    if arguments.engine != REPLAY_ENGINE:
        if arguments.replay_model is not None:
            parser.error("argument --replay-model: needs --engine replay")
        return
    script = Path(arguments.model).absolute()
    if not script.is_file():
        parser.error(f"argument MODEL: with --engine replay it must be a script, a file of JSON lines, got {script}")
    arguments.model = arguments.replay_model or DEFAULT_MODEL
    arguments.replay_script = str(script)
    arguments.worker_module = REPLAY_WORKER
    vars(arguments).setdefault("parallel.device", DeviceKind.CPU)


def choose_device(arguments: argparse.Namespace) -> None:
    """Put in the device where none was named, and the defaults that come with it."""
    given = vars(arguments)
    if given.get("parallel.device", DeviceKind.AUTO) is DeviceKind.AUTO:
        given["parallel.device"] = detect_device()
    if given["parallel.device"] is DeviceKind.CUDA:
        given.setdefault("scheduler.max_num_batched_tokens", GPU_MAX_NUM_BATCHED_TOKENS)


def check_arguments(parser: Parser, arguments: argparse.Namespace) -> None:
    """Check what spans several flags; ends with a usage error."""
    try:
        sections = sections_of(arguments)
    except ValueError as problem:
        parser.error(f"argument {in_words_of_flags(str(problem))}")
    if sections["parallel"].num_nodes > 1:
        check_cluster_key(parser, Path(sections["parallel"].cluster_key_file))
    if sections["parallel"].node_rank == 0:
        check_access(parser, sections["api"], arguments.insecure_public_bind)
        check_ports(parser, sections["api"], sections["parallel"])
    if len(arguments.served_model_name or ()) > MAX_SERVED_NAMES:
        parser.error(f"argument --served-model-name: at most {MAX_SERVED_NAMES} names, got more")
    chunk = sections["scheduler"].max_tokens_per_request
    if chunk is not None and chunk > sections["scheduler"].max_num_batched_tokens:
        parser.error("argument --max-tokens-per-request: must not exceed --max-num-batched-tokens")
    problem = why_host_memory_is_idle(sections["cache"], sections["scheduler"])
    problem = problem or why_share_is_idle(vars(arguments)) or why_format_is_not_computed(vars(arguments))
    if problem is not None:
        parser.error(problem)


def check_cluster_key(parser: Parser, path: Path) -> None:
    """Check the secret of the nodes; ends with a usage error."""
    from octavo.protocol.cluster_key import read_cluster_key  # needs zmq, which one node's command line does not

    try:
        read_cluster_key(path)
    except StartupError as problem:
        parser.error(f"argument --cluster-key-file: {problem.message}")


def check_ports(parser: Parser, api: ApiConfig, parallel: ParallelConfig) -> None:
    """Check that HTTP and the nodes do not want one port; ends with a usage error."""
    first = parallel.master_port
    if parallel.num_nodes > 1 and api.port in (first, first + 1):
        parser.error(f"argument --port: {api.port} is one of the ports of --master-port, {first} and {first + 1}")


def make_cluster_key(path: Path, log: StartupLog) -> ExitCode:
    """Write a new secret of nodes to `path`; raises StartupError."""
    from octavo.protocol.cluster_key import write_cluster_key

    write_cluster_key(path)
    log.note(f"wrote {path}: give every node a copy that only its owner can read")
    return ExitCode.OK


def check_access(parser: Parser, api: ApiConfig, is_public_on_purpose: bool) -> None:
    """Check that who can reach the server may use it; ends with a usage error."""
    host, key_file = api.host, api.api_key_file
    if not is_loopback(host) and key_file is None and not is_public_on_purpose:
        parser.error(
            f"argument --host: {host!r} can be reached from other machines and there is no --api-key-file; use "
            "127.0.0.1, name such a file, put an authenticating proxy in front, or say --insecure-public-bind"
        )
    if key_file is not None:
        try:
            load_api_keys(key_file)  # the API server reads it too, but only after the model has been fetched
        except StartupError as problem:
            parser.error(f"argument --api-key-file: {problem.message}")


def why_host_memory_is_idle(cache: CacheConfig, scheduler: SchedulerConfig) -> str | None:
    """Return what asks for host memory that is not there, or for memory that nothing would use."""
    has_host_blocks = cache.swap_space_bytes + cache.kv_offload_bytes > 0 or bool(cache.num_host_blocks)
    needed = "needs host memory: add --swap-space-gib, --kv-offload-gib or --num-host-blocks"
    if scheduler.preemption_mode is PreemptionMode.SWAP and not has_host_blocks:
        return f"argument --preemption-mode: swap {needed}"
    if cache.check_swapped_blocks and not has_host_blocks:
        return f"argument --check-swapped-blocks: {needed}"
    if cache.kv_offload_bytes and not cache.enable_prefix_caching:
        return "argument --kv-offload-gib: holds blocks of the prefix cache, which --no-enable-prefix-caching turns off"
    return None


def why_share_is_idle(given: dict[str, Any]) -> str | None:
    """Return which share of memory was given that the device does not have."""
    device = given.get("parallel.device")
    if device is DeviceKind.CPU and "cache.gpu_memory_utilization" in given:
        return "argument --gpu-memory-utilization: the model runs on the CPU, where --memory-utilization counts"
    if device is DeviceKind.CUDA and "cache.memory_utilization" in given:
        return "argument --memory-utilization: the model runs on a GPU, where --gpu-memory-utilization counts"
    return None


def why_format_is_not_computed(given: dict[str, Any]) -> str | None:
    """Return which number format was asked for that kernels of CPUs alone know."""
    if given.get("parallel.device") is not DeviceKind.CUDA:
        return None
    if given["quantization"] in (Quantization.INT8, Quantization.INT4):
        return f"argument --quantization: {given['quantization']} is for CPUs, and the model runs on a GPU"
    kv_cache_dtype = given.get("cache.kv_cache_dtype")
    if kv_cache_dtype in (KvCacheDtype.INT8, KvCacheDtype.FP8):
        return f"argument --kv-cache-dtype: {kv_cache_dtype} is for CPUs, and the model runs on a GPU"
    return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server on `host`; a name other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(arguments: argparse.Namespace) -> ExitCode:
    """Run the server until it is asked to stop, or until a problem that one line has told."""
    return run_guarded(lambda signals, log: _serve(arguments, signals, log))


def run_guarded(run: Callable[[SignalInbox, StartupLog], ExitCode]) -> ExitCode:
    """Call `run`; turn a problem into its line and exit code, and a request to stop into success."""
    log = StartupLog()
    with SignalInbox() as signals:
        try:
            return run(signals, log)
        except StartupError as problem:
            log.error(problem.message)
            return problem.exit_code
        except StopRequestedError:
            return ExitCode.OK


def _serve(arguments: argparse.Namespace, signals: SignalInbox, log: StartupLog) -> ExitCode:
    names = tuple(arguments.served_model_name or (default_served_name(arguments.model),))
    log.header(metadata.version("octavo"), names[0])
    request = ModelRequest(
        model=arguments.model,
        served_model_names=names,
        max_model_len=arguments.max_model_len,
        dtype=None if arguments.dtype == "auto" else Dtype(arguments.dtype),
        quantization=arguments.quantization,
        uses_generation_config=arguments.generation_config == "auto",
        default_sampling=arguments.override_generation_config,
    )
    cache_directory = Path(arguments.cache_dir) if arguments.cache_dir else default_cache_directory()
    model = resolve_model(request, cache_directory.absolute(), HelperRunner(signals), log)
    with create_ipc_directory() as ipc_directory:
        config = EngineConfig(
            model=model,
            ipc_directory=str(ipc_directory.path),
            worker_module=arguments.worker_module,
            replay_script=arguments.replay_script,
            **sections_of(arguments),
        )
        environment = worker_environment(config.parallel, os.environ)
        return Supervisor(config, process_specs(config, environment), signals, log).run()


def default_cache_directory() -> Path:
    """Return the cache directory of the XDG rules."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "octavo"


def create_ipc_directory() -> OwnedDirectory:
    """Make the private directory of the sockets, in the first place that is writable and has a short enough path."""
    problems = []
    places = [os.environ.get("XDG_RUNTIME_DIR", "")]
    with contextlib.suppress(FileNotFoundError):  # no temporary directory is usable
        places.append(tempfile.gettempdir())
    for place in (*places, "/tmp"):  # noqa: S108 - the new directory is private
        path = f"{place}/{IPC_PREFIX}01234567{LONGEST_SOCKET_NAME}"
        if place.startswith("/") and len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES and Path(place).is_dir():
            try:
                return OwnedDirectory.create(Path(place), IPC_PREFIX)
            except OSError as problem:
                problems.append(f"{place}: {problem.strerror}")
    raise StartupError(
        ExitCode.FAILURE,
        f"no place for the sockets ({'; '.join(problems) or 'all paths are too long'}); "
        "set XDG_RUNTIME_DIR or TMPDIR to a short, writable directory",
    )
