"""The architecture as a test: who may import whom, how big a file may grow, and what may not appear anywhere.

A rule that hinders is changed here, in the open, together with the design that it states; it is not bypassed.
"""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ALLOWED = {  # package -> first-party packages that it may import, besides itself
    "protocol": set(),
    "kernels": set(),
    "worker": {"protocol", "kernels"},
    "engine_core": {"protocol"},
    "api_server": {"protocol"},
    "simulator": {"protocol", "engine_core", "api_server"},  # of the last, shapes of requests
}
BANNED = {  # package -> third-party modules that must not appear below it
    "protocol": {"torch", "numpy"},
    "engine_core": {"torch", "triton", "numpy", "zmq"},
    "api_server": {"torch", "triton", "zmq"},
    "worker": {"zmq"},
    "kernels": {"zmq", "aiohttp", "msgspec"},
    "simulator": {"torch", "triton", "zmq"},
}
FOLDERS = {"simulator": "tests/simulation/simulator"}  # of packages that do not stand at the top level
BANNED_EVERYWHERE = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
BANNED_CALLS = {"eval", "exec", "torch.load", "yaml.load"}
TRANSPORT_USERS = {"engine_core/server.py", "engine_core/executor.py"}  # inside engine_core
ENVIRONMENT_READERS = {"api_server/cli.py"}
ZMQ_FILE = "protocol/transport.py"
MAX_LINES = 400
MAX_ENGINE_CORE_LINES = 3_000


def folder_of(package: str) -> Path:
    return ROOT / FOLDERS.get(package, package)


PRODUCT_FILES = sorted(path for package in ALLOWED for path in folder_of(package).rglob("*.py"))
TEST_FILES = sorted(set((ROOT / "tests").rglob("*.py")) - set(PRODUCT_FILES))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    return next(package for package in ALLOWED if path.is_relative_to(folder_of(package)))


def module_folder_of(path: Path) -> str:
    """Dotted name, below `octavo`, of the package that the file is in."""
    package = package_of(path)
    return ".".join((package, *path.parent.relative_to(folder_of(package)).parts))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def first_party(modules: set[str]) -> set[str]:
    return {module.split(".")[1] for module in modules if module.startswith("octavo.")}


def called_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=name_of)
def test_imports_follow_the_process_diagram(path: Path) -> None:
    name, package = name_of(path), package_of(path)
    modules = set(imported_modules(ast.parse(path.read_text())))
    top_level = {module.split(".")[0] for module in modules}
    allowed_zmq = {"zmq"} if name == ZMQ_FILE else set()

    assert first_party(modules) <= ALLOWED[package] | {package}
    assert not top_level & (BANNED[package] | {"zmq"}) - allowed_zmq
    assert not top_level & ALLOWED.keys(), "the folders are imported as octavo.<folder>"
    if package == "engine_core" and any(module.startswith("octavo.protocol.transport") for module in modules):
        assert name in TRANSPORT_USERS


@pytest.mark.parametrize("path", PRODUCT_FILES + TEST_FILES, ids=name_of)
def test_nothing_on_a_wire_or_disk_can_name_code(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not {module.split(".")[0] for module in imported_modules(tree)} & BANNED_EVERYWHERE
    assert not set(called_names(tree)) & BANNED_CALLS


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=name_of)
def test_checks_survive_python_dash_o(path: Path) -> None:
    asserts = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
    assert not asserts, f"assert statements at lines {asserts}"


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=name_of)
def test_only_the_command_line_reads_the_environment(path: Path) -> None:
    if name_of(path) not in ENVIRONMENT_READERS:
        source = path.read_text()
        assert "os.environ" not in source
        assert "getenv" not in source


@pytest.mark.parametrize("path", PRODUCT_FILES + TEST_FILES, ids=name_of)
def test_no_file_is_too_long_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_the_engine_core_stays_small() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "engine_core").rglob("*.py"))
    assert lines <= MAX_ENGINE_CORE_LINES


@pytest.mark.parametrize("path", PRODUCT_FILES, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    source = path.read_text()
    assert not source or ast.get_docstring(ast.parse(source))


def test_every_package_is_installed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = set(tomllib.load(file)["tool"]["setuptools"]["packages"])
    assert listed == {f"octavo.{module_folder_of(path)}" for path in PRODUCT_FILES}


def test_our_kernels_folder_is_not_mistaken_for_the_package_of_that_name() -> None:
    program = "import importlib.util as u, transformers; print(transformers.utils.is_kernels_available())"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "False"
