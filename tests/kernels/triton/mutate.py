"""Would the tests of a kernel notice a mistake in it? Changes one operator or constant at a time, and runs them.

By hand, for it takes long:

    python tests/kernels/triton/mutate.py norm                   every mutant of kernels/triton/norm.py
    python tests/kernels/triton/mutate.py attention_kernel --tests attention --every 7

The tests see a copy of the kernels in a temporary directory, put in front of the installed ones. A mutant that survives
is a test that is missing, or a change that changes nothing: a mask that is there for a GPU's sake, a tile that is
computed for nothing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.BitAnd: ast.BitOr,
    ast.Eq: ast.NotEq,
}
RUN = "import octavo.kernels as k, sys, pytest; k.__path__[:] = [sys.argv[1]]; sys.exit(pytest.main(sys.argv[2:]))"
LIMIT_S = 300


def is_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list)


def changed(node: ast.AST) -> bool:
    """Change `node` in place, if there is a way to."""
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value += 1
    else:
        return False
    return True


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """The place and text of each changed line, with the whole source that has it."""
    tree = ast.parse(source)
    for index, node in enumerate(ast.walk(tree)):
        if not is_kernel(node):
            continue
        for position in range(sum(1 for _ in ast.walk(node))):
            mutant = copy.deepcopy(tree)
            kernel = next(one for number, one in enumerate(ast.walk(mutant)) if number == index)
            place = next(one for number, one in enumerate(ast.walk(kernel)) if number == position)
            before = ast.unparse(place) if isinstance(place, ast.expr) else ""
            if changed(place):
                yield f"{node.name}:{place.lineno}: {before} → {ast.unparse(place)}", ast.unparse(mutant)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="of kernels/triton, without .py")
    parser.add_argument("--tests", help="of tests/kernels/triton, without test_ and .py (default: the module's name)")
    parser.add_argument("--every", type=int, default=1, help="take one mutant of so many")
    options = parser.parse_args()
    tests = ROOT / "tests" / "kernels" / "triton" / f"test_{options.tests or options.module}.py"
    with tempfile.TemporaryDirectory() as directory:
        kernels = Path(shutil.copytree(ROOT / "kernels", Path(directory) / "kernels"))
        path = kernels / "triton" / f"{options.module}.py"
        command = [sys.executable, "-B", "-c", RUN, kernels, "-x", "-q", "-p", "no:cacheprovider", tests]
        original = path.read_text()
        for text, source in [("nothing", original), *list(mutants(original))[:: options.every]]:
            path.write_text(source)
            try:
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, env=os.environ, timeout=LIMIT_S, check=False
                )
                verdict = "noticed" if done.returncode == 1 else f"SURVIVED ({done.returncode})"
            except subprocess.TimeoutExpired:
                verdict = "noticed (does not end)"
            print(verdict, text, flush=True)


if __name__ == "__main__":
    main()
