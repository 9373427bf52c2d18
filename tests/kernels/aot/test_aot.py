"""Every kernel compiles for every target without spills, within its memory, on tensor cores; and the check can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CHECK = FOLDER / "aot_check.py"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, CHECK, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def planted() -> dict[str, dict]:
    """Rows of kernels with known defects, by case."""
    done = check("--table", "aot_planted", "--targets", "sm_90", "--json")
    assert not done.returncode, done.stderr
    return {row["case"]: row for row in json.loads(done.stdout.splitlines()[-1])}


def test_all_kernels_on_all_targets(show_at_the_end) -> None:
    done = check()
    show_at_the_end("kernels compiled ahead of time", done.stdout)
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_further_cases_on_all_targets() -> None:
    done = check("--all")
    assert not done.returncode, done.stdout + done.stderr


def test_a_sound_kernel_passes(planted: dict[str, dict]) -> None:
    row = planted["sound"]
    assert not row["problems"]
    assert row["resources"]["tensor_core"] == "wgmma"
    assert row["resources"]["num_wide_loads"] > 0
    assert row["resident_blocks"] > 0
    assert "sound again" not in planted  # the same compiled kernel


def test_exact_fp32_needs_no_tensor_core(planted: dict[str, dict]) -> None:
    row = planted["exact fp32"]
    assert not row["problems"]
    assert (row["resources"]["has_dot"], row["resources"]["tensor_core"]) == (False, "")


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("spills", "bytes of stack per thread"),
        ("too much shared memory", "bytes of shared memory, 232448 are allowed"),
        ("does not compile", "mismatched_kernel|Mismatch|shape|broadcast"),
        ("launches nothing", "no kernel was launched"),
    ],
)
def test_a_defect_is_found(case: str, problem: str, planted: dict[str, dict]) -> None:
    (found,) = planted[case]["problems"]
    assert any(part in found for part in problem.split("|")), found


def test_a_product_without_tensor_cores_is_found() -> None:
    program = (
        "import aot_check, aot_compile, aot_targets\n"
        "resources = aot_compile.Resources(4, 1, 32, 0, 0, 0, True, '', 0, 0)\n"
        "print(aot_check.problems_of(resources, 8, aot_targets.TARGETS['sm_90']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=FOLDER, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['a matrix product without tensor cores']"


def test_a_failure_ends_with_a_message_and_status_1() -> None:
    done = check("--table", "aot_planted", "--targets", "sm_80", "--cases", "spills")
    assert done.returncode == 1
    assert "sm_80: spills: product_kernel: " in done.stdout
