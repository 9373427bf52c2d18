"""The tests of the kernels, compiled: the cases that run in the interpreter elsewhere, against the same references.

One process per test file, several at a time, because most of the time is the compiler's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_part import Options, Report, run_part

from octavo.protocol.config import DeviceKind

FOLDER = Path(__file__).parents[1] / "kernels" / "triton"
LIMIT_S = 100
MAX_PROCESSES = 8


def run_file(path: Path, interpret: bool) -> tuple[str, bool]:
    """The last line that pytest prints, with the tests that failed; and whether none did."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=line", path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if interpret else "0"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=LIMIT_S,
            cwd=FOLDER.parents[2],
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {LIMIT_S} s", False
    failed = re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", done.stdout, re.MULTILINE)
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    return "; ".join([last, *failed[:10]]), done.returncode == 0


def main(options: Options, report: Report) -> None:
    paths = sorted(FOLDER.glob("test_*.py"))
    paths = [path for path in paths if "interpreter" not in path.name]
    if options.is_tiny:
        paths = [path for path in paths if path.name == "test_philox.py"]
    interpret = options.device is DeviceKind.CPU
    with ThreadPoolExecutor(min(MAX_PROCESSES, max(1, (os.cpu_count() or 1) // 2))) as pool:
        for path, (text, is_ok) in zip(paths, pool.map(lambda path: run_file(path, interpret), paths), strict=True):
            report.add(path.name.removeprefix("test_").removesuffix(".py"), text, is_ok)


if __name__ == "__main__":
    run_part(main)
