"""The check of a GPU, tried out where there is none: every part on tiny shapes on the CPU; and parts that go wrong."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path

import check
import gpu_part
import part_attention_speed
import psutil
import pytest
import roofline
from check import Part
from gpu_part import Options, Report, Result

from octavo.protocol.config import DeviceKind

TRIED_OUT = Options(DeviceKind.CPU, is_tiny=True)
STARTS_A_SERVER = (pytest.mark.model, pytest.mark.slow)
NAMES = [pytest.param(part.name, marks=STARTS_A_SERVER if part.name == "server" else ()) for part in check.PARTS]


@pytest.mark.parametrize("name", NAMES)
def test_a_part_finds_nothing_wrong_on_the_cpu(name: str) -> None:
    report = Report()
    importlib.import_module(f"part_{name}").main(TRIED_OUT, report)
    assert report.results
    assert not [result for result in report.results if result.is_ok is False]


def test_all_parts_are_run_within_eight_minutes() -> None:
    assert {part.name for part in check.PARTS} == {
        path.stem.removeprefix("part_") for path in check.FOLDER.glob("part_*.py")
    }
    assert sum(part.limit_s for part in check.PARTS) <= 480


def write_part(folder: Path, name: str, body: str) -> Part:
    (folder / f"part_{name}.py").write_text(
        f"import subprocess, sys, time\nfrom gpu_part import run_part\n"
        f"def main(options, report):\n    {body}\nrun_part(main)\n"
    )
    return Part(name, 20)


def test_a_part_that_is_fine(tmp_path: Path) -> None:
    part = write_part(tmp_path, "fine", "report.add('speed', '1 | 2'); report.add('sum', '3', True)")
    results = check.run_part(part, [], tmp_path)
    assert results == [Result("speed", "1 | 2"), Result("sum", "3", True)]
    assert check.table_of({"fine": results}).splitlines()[-2:] == [
        "| fine | speed | 1 \\| 2 |  |",
        "| fine | sum | 3 | ok |",
    ]


def test_a_wrong_result_is_not_reported_twice(tmp_path: Path) -> None:
    part = write_part(tmp_path, "wrong", "report.add('sum', '4', False)")
    assert check.run_part(part, [], tmp_path) == [Result("sum", "4", False)]


def test_what_was_found_before_a_failure_stays(tmp_path: Path) -> None:
    part = write_part(tmp_path, "raises", "report.add('sum', '3', True); raise ValueError('no such kernel')")
    found, itself = check.run_part(part, [], tmp_path)
    assert found == Result("sum", "3", True)
    assert itself.is_ok is False
    assert "ValueError: no such kernel" in itself.value


def test_a_part_that_says_nothing_is_wrong(tmp_path: Path) -> None:
    assert check.run_part(write_part(tmp_path, "silent", "pass"), [], tmp_path)[0].is_ok is False


def test_a_part_that_hangs_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    body = (
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
        "    report.add('child', str(child.pid)); time.sleep(1000)"
    )
    started, itself = check.run_part(write_part(tmp_path, "hangs", body)._replace(limit_s=8), [], tmp_path)
    assert itself == Result("the part itself", "stopped after 8 s", False)
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(int(started.value)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(started.value))


@pytest.mark.parametrize(("is_ok", "status"), [(True, 0), (None, 0), (False, 1)])
def test_a_part_ends_with_its_verdict(is_ok: bool | None, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["part", "--device", "cpu", "--tiny"])
    seen = []
    with pytest.raises(SystemExit) as end:
        gpu_part.run_part(lambda options, report: (seen.append(options), report.add("sum", "3", is_ok)))
    assert end.value.code == status
    assert seen == [TRIED_OUT]


def test_the_roofline_predicts_what_is_measured() -> None:
    gpu = part_attention_speed.gpu_called("NVIDIA H100 80GB HBM3")
    assert gpu is roofline.GPUS[1]
    assert part_attention_speed.gpu_called("NVIDIA GeForce RTX 4090") is None
    predictions = part_attention_speed.predictions_for(gpu)
    assert {work.name for work in part_attention_speed.WORKS} <= predictions.keys()


def test_the_script_says_what_is_missing(tmp_path: Path) -> None:
    script = check.FOLDER / "check.sh"
    done = subprocess.run(
        ["/bin/sh", script], env={"PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "torch finds no GPU" in done.stderr
