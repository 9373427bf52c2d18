"""Compiles every kernel for every target, and says what is wrong with what came out.

    python tests/kernels/aot/aot_check.py                     the chosen cases, all targets; exit status 1 on a problem
    python tests/kernels/aot/aot_check.py --all --readme      every case; the table goes into README.md beside this file
    python tests/kernels/aot/aot_check.py --targets sm_90 --cases attention

Problems are: an error of the compiler, registers moved to memory, shared memory that a block or a multiprocessor does
not have, a matrix product that no tensor core computes. It prints a table in Markdown: per kernel and target the
registers of a thread, the shared memory of a block, the blocks that a multiprocessor holds, the tensor-core
instruction. One process per target, two at a time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aot_targets import TARGETS, Target

README = Path(__file__).with_name("README.md")
START, END = "<!-- table: made by aot_check.py --all --readme -->", "<!-- end of table -->"
NUM_PROCESSES = 2


@dataclass
class Row:
    """What one kernel of one case came to on one target."""

    target: str
    case: str
    kernel: str
    seconds: float
    problems: list[str] = field(default_factory=list)
    resident_blocks: int = 0
    resources: dict[str, Any] = field(default_factory=dict)
    num_programs: int = 0

    @property
    def cell(self) -> str:
        if not self.resources:
            return "**fails**"
        shared_kib = self.resources["shared_bytes"] / 1024
        text = f"{self.resources['num_registers']} r, {shared_kib:.0f} KiB, {self.resident_blocks} b"
        text += f", {self.resources['tensor_core']}" if self.resources["tensor_core"] else ""
        return f"**{text}**" if self.problems else text


def problems_of(resources: Any, resident_blocks: int, target: Target) -> list[str]:
    problems = []
    if resources.stack_bytes:
        problems.append(f"{resources.stack_bytes} bytes of stack per thread: registers spill, or an array is indexed")
    if resources.shared_bytes > target.max_block_shared_bytes:
        problems.append(f"{resources.shared_bytes} bytes of shared memory, {target.max_block_shared_bytes} are allowed")
    elif not resident_blocks:
        problems.append(f"no multiprocessor can hold a block of {resources.num_registers} registers a thread")
    if resources.has_dot and not resources.tensor_core:
        problems.append("a matrix product without tensor cores")
    return problems


def deepest_message(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[-3:])[:400]}"


def rows_of(case: Any, target: Target, seen: set[str]) -> list[Row]:
    """Compile one case; kernels that an earlier case compiled are left out."""
    from aot_compile import compiled_launches, resources_of

    rows: list[Row] = []
    started = time.monotonic()
    with compiled_launches(target) as launches:
        try:
            case.run()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            rows.append(Row(target.name, case.name, "", time.monotonic() - started, [deepest_message(error)]))
    if not launches and not rows:
        rows.append(Row(target.name, case.name, "", 0.0, ["no kernel was launched"]))
    share_s = (time.monotonic() - started) / max(1, len(launches))
    for launch in launches:
        if launch.kernel.hash in seen:
            continue
        seen.add(launch.kernel.hash)
        resources = resources_of(launch.kernel, target)
        blocks = target.resident_blocks(resources.num_warps, resources.num_registers, resources.shared_bytes)
        row = Row(target.name, case.name, launch.kernel_name, share_s, problems_of(resources, blocks, target), blocks)
        row.resources, row.num_programs = resources.as_dict(), launch.num_programs
        rows.append(row)
    return rows


def check_target(name: str, table: str, pattern: str, is_all: bool) -> list[Row]:
    """Compile the cases for one target, in this process."""
    target, seen, cases = TARGETS[name], set(), importlib.import_module(table).CASES
    chosen = [case for case in cases if pattern in case.name and (is_all or not case.is_slow)]
    return [row for case in chosen for row in rows_of(case, target, seen)]


def check_in_processes(targets: Sequence[str], arguments: Sequence[str]) -> list[Row]:
    """Compile for several targets, each in a process of its own that compiles and does not interpret."""

    def check(target: str) -> list[Row]:
        command = [sys.executable, __file__, *arguments, "--targets", target, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return [Row(target, "", "", 0.0, [f"the process ended with {done.returncode}: {done.stderr[-2000:]}"])]
        return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]

    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        return [row for rows in pool.map(check, targets) for row in rows]


def table_of(rows: Sequence[Row], targets: Sequence[str]) -> str:
    """Markdown; a row per case and kernel, a column per target."""
    lines = [f"| case | kernel | {' | '.join(targets)} |", "|---|---|" + "---|" * len(targets)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        line = cells.setdefault((row.case, row.kernel), {})
        line[row.target] = f"{line[row.target]}; {row.cell}" if row.target in line else row.cell
    for (case, kernel), line in cells.items():
        lines.append(f"| {case} | `{kernel}` | {' | '.join(line.get(target, '–') for target in targets)} |")
    return "\n".join(lines)


def messages_of(rows: Sequence[Row]) -> list[str]:
    return [f"{row.target}: {row.case}: {row.kernel}: {problem}" for row in rows for problem in row.problems]


def write_readme(table: str) -> None:
    before, rest = README.read_text().split(START)
    README.write_text(f"{before}{START}\n{table}\n{END}{rest.split(END)[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--cases", default="", help="only those whose name contains this")
    parser.add_argument("--table", default="aot_cases", help="module with the cases (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="also those that `make test` leaves out")
    parser.add_argument("--json", action="store_true", help="one target, in this process; print the rows as JSON")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    options = parser.parse_args()
    targets = options.targets.split(",")
    if options.json:
        print(json.dumps([vars(row) for row in check_target(targets[0], options.table, options.cases, options.all)]))
        return 0
    arguments = ["--table", options.table, "--cases", options.cases, *(["--all"] if options.all else [])]
    rows = check_in_processes(targets, arguments)
    table = table_of(rows, targets)
    print(table)
    print("\n".join(["", *messages_of(rows)]))
    if options.readme:
        write_readme(table)
    return 1 if messages_of(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
