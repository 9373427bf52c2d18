"""What all tests share: kernels run in Triton's interpreter, and the embedded default model.

Triton decides when it is imported, and when a kernel is defined, whether kernels are compiled or interpreted, so that
is set here, before any test is imported. It holds for this process only: programs that tests start do as they would for
a user. With TRITON_INTERPRET=0 in the environment kernels are compiled, which needs a GPU (see tests/gpu).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from embedded_model import locate_embedded_model

from octavo.api_server.model_source import Location
from octavo.kernels import registry


def interpret_triton_kernels() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]


HAS_TRITON = find_spec("triton") is not None  # it exists for Linux only
if HAS_TRITON and os.environ.get("TRITON_INTERPRET") != "0":
    interpret_triton_kernels()

collect_ignore = [] if HAS_TRITON else ["kernels/triton", "kernels/aot", "bench/test_roofline.py", "gpu"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, unless they are asked for with `-m slow`."""
    if "slow" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)


@pytest.fixture(autouse=True)
def reference_kernels_afterwards() -> Iterator[None]:
    """A test may choose the kernels of its process, as a worker does at its start; the next one gets the references."""
    yield
    registry.select()


SHOWN = pytest.StashKey[dict[str, str]]()


@pytest.fixture
def show_at_the_end(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """A function (title, text) whose text stands below the results of the run: for tables that a check makes."""
    return request.config.stash.setdefault(SHOWN, {}).__setitem__


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, text in config.stash.get(SHOWN, {}).items():
        terminalreporter.section(title)
        terminalreporter.write_line(text)


@pytest.fixture(scope="session")
def smollm2() -> Location:
    """The default model: its GGUF file, and the directory into which its metadata was imported."""
    return locate_embedded_model()


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2: Location) -> Path:
    return smollm2.weights_path


@pytest.fixture(scope="session")
def smollm2_directory(smollm2: Location) -> Path:
    return smollm2.path
