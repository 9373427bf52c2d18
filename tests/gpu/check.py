"""Runs the parts of the check of a GPU, each a process with a time limit, and prints one table: see `check.sh`.

    python tests/gpu/check.py [--device cpu --tiny] [--model FILE] [--only NAME,NAME] [--markdown FILE]

What a part found before it failed or was stopped is in the table; exit status 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from gpu_part import RESULT, Result

FOLDER = Path(__file__).parent
IMPORTED_FROM = (FOLDER, FOLDER.parent, FOLDER.parent / "bench")


class Part(NamedTuple):
    name: str
    limit_s: float


PARTS = (  # 8 minutes in all
    Part("kernels", 120),
    Part("token_identity", 60),
    Part("graphs", 60),
    Part("server", 50),
    Part("swap", 25),
    Part("deterministic", 45),
    Part("attention_speed", 40),
    Part("step_time", 80),
)
VERDICTS = {True: "ok", False: "WRONG", None: ""}


def results_in(output: str) -> list[Result]:
    lines = [line for line in output.splitlines() if line.startswith(RESULT)]
    return [Result(*json.loads(line.removeprefix(RESULT))) for line in lines]


def kill_with_descendants(pid: int) -> None:
    """A part may have started a server, whose processes would outlive it."""
    part = psutil.Process(pid)
    for process in [part, *part.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def run_part(part: Part, arguments: Sequence[str], folder: Path = FOLDER) -> list[Result]:
    """What the part found; and what became of it, when it did not come to its end."""
    program = folder / f"part_{part.name}.py"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, IMPORTED_FROM)),
        "PYTHONUNBUFFERED": "1",
    }
    started_s = time.monotonic()
    with subprocess.Popen(
        [sys.executable, program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            output, errors = process.communicate(timeout=part.limit_s)
            problem = ""
        except subprocess.TimeoutExpired:
            kill_with_descendants(process.pid)
            output, errors = process.communicate()
            problem = f"stopped after {part.limit_s:.0f} s"
    results = results_in(output)
    if not problem and process.returncode and all(result.is_ok is not False for result in results):
        problem = f"ended with {process.returncode}: {' | '.join(errors.strip().splitlines()[-3:])[-400:]}"
    if problem:
        results.append(Result("the part itself", problem, False))
    elapsed = f"{part.name}: {time.monotonic() - started_s:.0f} s"
    print(elapsed, *([errors[-3000:]] if problem else []), sep="\n", file=sys.stderr, flush=True)
    return results or [Result("the part itself", "found nothing", False)]


def table_of(results: dict[str, list[Result]]) -> str:
    lines = ["| part | what | result | |", "|---|---|---|---|"]
    for part, rows in results.items():
        for row in rows:
            value = row.value.replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {part.replace('_', ' ')} | {row.name} | {value} | {VERDICTS[row.is_ok]} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes and a made-up model: tries out the check")
    parser.add_argument("--model", help="GGUF file or directory (default: the embedded model)")
    parser.add_argument("--only", default=",".join(part.name for part in PARTS), help="parts, comma-separated")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    arguments = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    arguments += ["--model", options.model] if options.model else []
    chosen = options.only.split(",")
    if unknown := set(chosen) - {part.name for part in PARTS}:
        parser.error(f"--only: no part is called {', '.join(sorted(unknown))}")
    results = {part.name: run_part(part, arguments) for part in PARTS if part.name in chosen}
    table = table_of(results)
    print(table)
    if options.markdown:
        options.markdown.write_text(table + "\n")
    return 1 if any(row.is_ok is False for rows in results.values() for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
