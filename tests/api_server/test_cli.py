"""The command line: what it accepts, what it refuses and how, and that it answers before anything heavy loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_process import OCTAVO

from octavo.api_server import cli
from octavo.api_server.flags import FLAGS, KV_SIZE_FLAGS
from octavo.api_server.options import build_parser, sections_of
from octavo.protocol.cluster_key import write_cluster_key
from octavo.protocol.config import (
    AdmissionPolicy,
    ApiConfig,
    CacheConfig,
    DeviceKind,
    KvCacheDtype,
    ParallelConfig,
    PreemptionMode,
    SchedulerConfig,
    SchedulingPolicy,
)
from octavo.protocol.lifecycle import ExitCode, StartupError

HEAVY = {"torch", "transformers", "numpy", "aiohttp", "zmq", "tokenizers", "gguf", "huggingface_hub", "jinja2"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([OCTAVO, *arguments], capture_output=True, text=True, check=False, timeout=60)


def sections(*arguments: str) -> dict[str, Any]:
    return sections_of(build_parser().parse_args(["serve", "m", *arguments]))


def test_without_flags_the_config_has_its_own_defaults() -> None:
    assert sections() == {
        "api": ApiConfig(),
        "scheduler": SchedulerConfig(),
        "cache": CacheConfig(),
        "parallel": ParallelConfig(),
    }


def test_flags_become_the_config() -> None:
    found = sections(
        *("--host", "127.0.0.2", "--port", "0", "--request-timeout", "5", "--drain-grace", "0", "--log-requests"),
        *("--max-num-seqs", "3", "--max-tokens-per-request", "7", "--max-steps-in-flight", "1", "--threads", "2"),
        *("--block-size", "32", "--memory-utilization", "0.9", "--kv-cache-memory", "1.5GiB"),
        *("--gpu-memory-utilization", "0.8", "--max-queued-tokens", "99"),
        *("--scheduling-policy", "longest-prefix", "--admission-policy", "reserve-all", "--preemption-mode", "swap"),
        *("--max-prefill-share", "0.25", "--max-preemptions-per-request", "2"),
        *("--no-enable-prefix-caching", "--swap-space-gib", "1.5", "--kv-offload-gib", "0", "--num-host-blocks", "0"),
        *("--check-swapped-blocks", "--kv-cache-dtype", "int8"),
    )
    assert found["api"] == ApiConfig(
        host="127.0.0.2",
        port=0,
        request_timeout_s=5.0,
        drain_grace_s=0.0,
        log_requests=True,
        max_queued_tokens=99,
    )
    assert found["scheduler"] == SchedulerConfig(
        max_num_seqs=3,
        max_tokens_per_request=7,
        max_steps_in_flight=1,
        scheduling_policy=SchedulingPolicy.LONGEST_PREFIX,
        admission_policy=AdmissionPolicy.RESERVE_ALL,
        preemption_mode=PreemptionMode.SWAP,
        max_prefill_share=0.25,
        max_preemptions_per_request=2,
    )
    assert isinstance(found["scheduler"].scheduling_policy, SchedulingPolicy)
    assert found["parallel"] == ParallelConfig(num_threads=2)
    assert found["cache"] == CacheConfig(
        block_size=32,
        memory_utilization=0.9,
        gpu_memory_utilization=0.8,
        kv_cache_bytes=3 * 2**29,
        enable_prefix_caching=False,
        swap_space_bytes=3 * 2**29,
        kv_offload_bytes=0,
        num_host_blocks=0,
        check_swapped_blocks=True,
        kv_cache_dtype=KvCacheDtype.INT8,
    )
    assert sections("--enable-prefix-caching")["cache"] == CacheConfig()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--quantization", "int3"), "argument --quantization: must be one of none, int8, int4, auto, got 'int3'"),
        (("--kv-cache-dtype", "int4"), "argument --kv-cache-dtype: must be one of auto, bf16, fp8, int8, got 'int4'"),
        (("--device", "cuda", "--quantization", "int8"), "argument --quantization: int8 is for CPUs"),
        (("--device", "cuda", "--kv-cache-dtype", "fp8"), "argument --kv-cache-dtype: fp8 is for CPUs"),
    ],
)
def test_a_format_that_the_device_does_not_compute_is_refused(flags: tuple[str, ...], words: str) -> None:
    finished = run("serve", "m", *flags)
    assert finished.returncode == ExitCode.USAGE
    assert words in finished.stderr


def test_flags_of_devices_and_nodes(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.touch()
    found = sections(
        *("--device", "cuda", "--tensor-parallel-size", "8", "--enforce-eager", "--deterministic"),
        *("--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "4000"),
        *("--cluster-key-file", str(key_file), "--node-timeout", "5"),
    )
    assert found["parallel"] == ParallelConfig(
        device=DeviceKind.CUDA,
        tensor_parallel_size=8,
        enforce_eager=True,
        deterministic=True,
        num_nodes=2,
        node_rank=1,
        master_address="10.0.0.1",
        master_port=4000,
        cluster_key_file=str(key_file),
        node_timeout_s=5.0,
    )
    assert list(found["parallel"].local_ranks) == [4, 5, 6, 7]


@pytest.mark.parametrize(("text", "num_bytes"), [("4096", 4096), ("512MiB", 2**29), ("2GiB", 2**31), ("1 KiB", 1024)])
def test_sizes_have_units(text: str, num_bytes: int) -> None:
    assert sections("--kv-cache-memory", text)["cache"] == CacheConfig(kv_cache_bytes=num_bytes)


TWO_NODES = ("--nnodes", "2", "--tensor-parallel-size", "2")
VALUE_FLAGS = [
    flag for flag in (*FLAGS, *KV_SIZE_FLAGS) if flag.type is not bool and flag.field not in ("host", "master_address")
]


@pytest.mark.parametrize("flag", [name for flag in VALUE_FLAGS for name in flag.names])
@pytest.mark.parametrize("value", ["", "x", "-1", "nan", "inf", "1e999", "99999999999999999999999", "None"])
def test_no_flag_takes_nonsense(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["serve", "m", f"{flag}={value}"])
    assert ended.value.code == ExitCode.USAGE
    message = capsys.readouterr().err
    assert message.startswith("octavo: error: argument ")
    assert flag in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve"], "MODEL"),
        ([], "command"),
        (["serve", "m", "--max-num-seq", "3"], "--max-num-seq"),
        (["serve", "m", "--dtype", "int8"], "--dtype"),
        (["serve", "m", "--tensor-parallel-size", "65"], "--tensor-parallel-size"),
        (["serve", "m", "--device", "tpu"], "--device: must be one of auto, cpu, cuda, got 'tpu'"),
        (["serve", "m", "--nnodes", "2"], "--tensor-parallel-size (1) must be a multiple of --nnodes (2)"),
        (["serve", "m", "--node-rank", "1"], "--node-rank (1) must be below --nnodes (1)"),
        (
            ["serve", "m", *TWO_NODES, "--cluster-key-file", __file__],
            "--master-addr must be given, because --nnodes is 2",
        ),
        (["serve", "m", *TWO_NODES, "--master-addr", "a"], "--cluster-key-file must be given, because --nnodes is 2"),
        (["serve", "m", *TWO_NODES, "--master-addr", "a b"], "--master-addr"),
        (["serve", "m", *TWO_NODES, "--master-addr", "a", "--cluster-key-file", __file__], "--cluster-key-file"),
        (["serve", "m", "--host", "0.0.0.0"], "--insecure-public-bind"),  # noqa: S104
        (["serve", "m", "--host", "example.org"], "--insecure-public-bind"),
        (["serve", "m", "--served-model-name", " "], "--served-model-name"),
        (["serve", "m", *(["--served-model-name", "a"] * 33)], "--served-model-name"),
        (
            ["serve", "m", *("--max-tokens-per-request", "9", "--max-num-batched-tokens", "8", "--max-num-seqs", "8")],
            "--max-tokens-per-request",
        ),
        (["serve", "m", "--max-num-batched-tokens", "8"], "--max-num-seqs (256) must not be above --max-num-batched-"),
        (["serve", "m", "--max-num-seqs", "513"], "--max-num-seqs (513) must not be above --max-num-batched-tokens ("),
        (["serve", "m", "--scheduling-policy", "lifo"], "must be one of fcfs, priority, longest-prefix, got 'lifo'"),
        (["serve", "m", "--swap-space-gib", "1GiB"], "--swap-space-gib: must be a number of GiB"),
        (["serve", "m", "--max-prefill-share", "0"], "--max-prefill-share"),
        (["serve", "m", "--enable-prefix-caching=maybe"], "--enable-prefix-caching"),
        (["serve", "m", "--api-key-file", "/nowhere"], "--api-key-file: must be a file"),
        (["serve", "m", "--api-key-file", __file__], "--api-key-file"),
        (["serve", "m", "--kv-cache-memory", "1GiB", "--num-device-blocks", "8"], "--kv-cache-memory"),
    ],
)
def test_a_usage_error_is_one_line_that_names_the_flag(arguments: list[str], named: str) -> None:
    result = run(*arguments)
    assert result.returncode == ExitCode.USAGE
    assert result.stderr.startswith("octavo: error: ")
    assert named in result.stderr
    assert result.stderr.count("\n") == 1


def test_simulate_hands_everything_to_the_simulator(tmp_path: Path) -> None:
    package = tmp_path / "octavo_stand_in"
    package.mkdir()
    (package / "__main__.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)")
    program = (
        "import sys; from octavo.api_server import cli; cli.SIMULATOR = 'octavo_stand_in'; "
        "sys.argv = ['octavo', 'simulate', '--help', 'trace.csv', '--json', '-x']; cli.main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stdout) == (7, "['--help', 'trace.csv', '--json', '-x']\n")
    missing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert missing.returncode == ExitCode.FAILURE
    assert missing.stderr == "octavo: error: the simulator is not installed with this server\n"


def test_a_public_host_needs_keys_or_consent(tmp_path: Path) -> None:
    key_file = tmp_path / "keys.toml"
    key_file.write_text('[[key]]\nname = "a"\nkey = "sk-1"\n')
    key_file.chmod(0o600)
    parser = build_parser()
    for consent in (["--api-key-file", str(key_file)], ["--insecure-public-bind"]):
        cli.check_arguments(parser, parser.parse_args(["serve", "m", "--host", "0.0.0.0", *consent]))  # noqa: S104


def test_a_key_file_that_others_can_read_is_refused_and_no_key_is_shown(tmp_path: Path) -> None:
    key_file = tmp_path / "keys.toml"
    key_file.write_text('[[key]]\nname = "a"\nkey = "sk-1"\n')
    key_file.chmod(0o604)
    result = run("serve", "m", "--api-key-file", str(key_file))
    assert result.returncode == ExitCode.USAGE
    assert f"chmod o-rwx {key_file}" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "sk-1" not in result.stderr


def test_a_new_cluster_key_is_only_for_its_owner_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert run("cluster-key", str(path)).returncode == ExitCode.OK
    assert path.stat().st_mode & 0o777 == 0o600
    secret = path.read_text()
    again = run("cluster-key", str(path))
    assert again.returncode == ExitCode.FAILURE
    assert again.stderr == f"octavo: error: cannot write {path}: File exists\n"
    assert path.read_text() == secret
    assert secret.strip() not in again.stderr


def test_a_cluster_key_that_others_can_read_is_refused_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_cluster_key(path)
    path.chmod(0o640)
    result = run("serve", "m", *TWO_NODES, "--master-addr", "a", "--cluster-key-file", str(path))
    assert result.returncode == ExitCode.USAGE
    assert f"--cluster-key-file: {path} is open to others than its owner; run: chmod 600 {path}" in result.stderr
    assert path.read_text().strip() not in result.stderr


def test_only_node_0_answers_http_so_only_there_its_flags_are_checked(tmp_path: Path) -> None:
    write_cluster_key(tmp_path / "key")
    shared = ("--master-addr", "a", "--cluster-key-file", str(tmp_path / "key"), "--host", "0.0.0.0")  # noqa: S104
    parser = build_parser()
    cli.check_arguments(parser, parser.parse_args(["serve", "m", *TWO_NODES, *shared, "--node-rank", "1"]))
    with pytest.raises(SystemExit):
        cli.check_arguments(parser, parser.parse_args(["serve", "m", *TWO_NODES, *shared]))


@pytest.mark.parametrize("port", ["29500", "29501"])
def test_http_and_the_nodes_do_not_want_one_port(tmp_path: Path, port: str, capsys) -> None:
    write_cluster_key(tmp_path / "key")
    nodes = (*TWO_NODES, "--master-addr", "a", "--cluster-key-file", str(tmp_path / "key"))
    parser = build_parser()
    with pytest.raises(SystemExit):
        cli.check_arguments(parser, parser.parse_args(["serve", "m", *nodes, "--port", port]))
    assert f"argument --port: {port} is one of the ports of --master-port, 29500 and 29501" in capsys.readouterr().err


def test_version() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, "octavo 0.1.0\n")


def test_importing_the_command_loads_nothing_heavy() -> None:
    program = "import sys; before = set(sys.modules); import octavo.api_server.cli; print(*set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not {name.split(".")[0] for name in loaded.split()} & HEAVY


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", True), ("::1", True), ("localhost", True)])
def test_loopback_hosts(host: str, expected: bool) -> None:
    assert cli.is_loopback(host) is expected


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", ""])  # noqa: S104
def test_public_hosts(host: str) -> None:
    assert not cli.is_loopback(host)


def test_the_cache_directory_follows_the_xdg_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.default_cache_directory() == tmp_path / "octavo"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/are/ignored")
    assert cli.default_cache_directory() == Path.home() / ".cache/octavo"


def test_the_socket_directory_is_private_and_its_path_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 100)
    too_long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(too_long))
    with cli.create_ipc_directory() as directory:
        assert directory.path.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(f"{directory.path}/engine")) <= 107
    assert not directory.path.exists()


def test_without_a_place_for_sockets_the_start_fails_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cli.OwnedDirectory, "create", fail)
    with pytest.raises(StartupError, match="XDG_RUNTIME_DIR"):
        cli.create_ipc_directory()


def test_closed_standard_streams_are_survived() -> None:
    result = subprocess.run(
        ["/bin/sh", "-c", f"exec {OCTAVO} serve /nowhere <&- >&- 2>&-"], check=False, timeout=60, close_fds=False
    )
    assert result.returncode == ExitCode.MODEL_NOT_FOUND


def test_a_broken_stderr_is_survived() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([OCTAVO, "serve", "/nowhere"], stderr=writer, check=False, timeout=60)
    os.close(writer)
    assert result.returncode == ExitCode.MODEL_NOT_FOUND


@pytest.mark.parametrize(
    ("flags", "flag", "reason"),
    [
        (["--preemption-mode", "swap"], "--preemption-mode", "needs host memory"),
        (["--check-swapped-blocks"], "--check-swapped-blocks", "needs host memory"),
        (["--kv-offload-gib", "1", "--no-enable-prefix-caching"], "--kv-offload-gib", "the prefix cache"),
    ],
)
def test_what_asks_for_host_memory_has_some_and_uses_it(
    flags: list[str], flag: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = build_parser()
    with pytest.raises(SystemExit) as end:
        cli.check_arguments(parser, parser.parse_args(["serve", "m", *flags]))
    assert end.value.code == ExitCode.USAGE
    line = capsys.readouterr().err
    assert flag in line
    assert reason in line
    with_memory = [*flags[:2], "--num-host-blocks", "9"]
    cli.check_arguments(parser, parser.parse_args(["serve", "m", *with_memory]))
