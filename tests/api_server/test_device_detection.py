"""Which device is taken when nobody says so, and the defaults that come with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.api_server import cli
from octavo.api_server.device_detection import detect_device, find_torch_directory
from octavo.api_server.options import build_parser, sections_of
from octavo.protocol.config import GPU_MAX_NUM_BATCHED_TOKENS, DeviceKind, SchedulerConfig

CPU_BUILD = "cuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA_BUILD = "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
OLD_CUDA_BUILD = "cuda = '12.4'\nhip: Optional[str] = None\n"
ROCM_BUILD = "cuda: Optional[str] = None\nhip: Optional[str] = '7.1'\n"


@pytest.mark.parametrize(
    ("version", "driver", "kind"),
    [
        (CUDA_BUILD, "nvidiactl", DeviceKind.CUDA),
        (OLD_CUDA_BUILD, "nvidiactl", DeviceKind.CUDA),
        (ROCM_BUILD, "kfd", DeviceKind.CUDA),
        (CUDA_BUILD, "kfd", DeviceKind.CPU),
        (ROCM_BUILD, "nvidiactl", DeviceKind.CPU),
        (CPU_BUILD, "nvidiactl", DeviceKind.CPU),
        (CUDA_BUILD, "null", DeviceKind.CPU),
        (None, "nvidiactl", DeviceKind.CPU),
    ],
)
def test_a_gpu_counts_when_torch_was_built_for_it(tmp_path: Path, version: str | None, driver: str, kind) -> None:
    (tmp_path / driver).touch()
    if version is not None:
        (tmp_path / "version.py").write_text(version)
    assert detect_device(tmp_path, tmp_path) is kind


def test_the_installed_torch_is_found() -> None:
    directory = find_torch_directory()
    assert directory is not None
    assert "cuda" in (directory / "version.py").read_text()


@pytest.mark.parametrize(
    ("flags", "detected", "device", "num_tokens"),
    [
        ((), DeviceKind.CUDA, DeviceKind.CUDA, GPU_MAX_NUM_BATCHED_TOKENS),
        ((), DeviceKind.CPU, DeviceKind.CPU, SchedulerConfig().max_num_batched_tokens),
        (("--device", "auto"), DeviceKind.CUDA, DeviceKind.CUDA, GPU_MAX_NUM_BATCHED_TOKENS),
        (("--device", "cpu"), DeviceKind.CUDA, DeviceKind.CPU, SchedulerConfig().max_num_batched_tokens),
        (("--device", "cuda"), DeviceKind.CPU, DeviceKind.CUDA, GPU_MAX_NUM_BATCHED_TOKENS),
        (("--max-num-batched-tokens", "999"), DeviceKind.CUDA, DeviceKind.CUDA, 999),
    ],
)
def test_a_gpu_has_a_larger_token_budget(monkeypatch, flags, detected, device, num_tokens) -> None:
    monkeypatch.setattr(cli, "detect_device", lambda: detected)
    arguments = build_parser().parse_args(["serve", "m", *flags])
    cli.choose_device(arguments)
    sections = sections_of(arguments)
    assert sections["parallel"].device is device
    assert sections["scheduler"].max_num_batched_tokens == num_tokens


@pytest.mark.parametrize(
    ("flag", "device", "words"),
    [
        ("--gpu-memory-utilization", "cpu", "--memory-utilization"),
        ("--memory-utilization", "cuda", "--gpu-memory-utilization"),
    ],
)
def test_a_share_of_the_other_kind_of_memory_is_refused(capsys, flag, device, words) -> None:
    parser = build_parser()
    arguments = parser.parse_args(["serve", "m", flag, "0.5", "--device", device])
    cli.choose_device(arguments)
    with pytest.raises(SystemExit):
        cli.check_arguments(parser, arguments)
    message = capsys.readouterr().err
    assert f"argument {flag}" in message
    assert words in message
