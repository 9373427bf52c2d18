"""One server of the embedded model for all client tests, and what runs the clients that live in other environments."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import anthropic
import openai
import pytest
from embedded_model import EMBEDDED_MODEL
from end_to_end.clients.install import is_installed, python_of
from server_process import ServerProcess

PATIENCE_S = 300.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


@pytest.fixture(scope="package")
def server(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    with ServerProcess(EMBEDDED_MODEL, "--max-model-len", "2048", "--kv-cache-memory", "512MiB") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=PATIENCE_S) as client:
        yield client


def run(command: Sequence[str], environment: dict[str, str], directory: Path) -> str:
    """Run a client to its good end; return what it printed."""
    result = subprocess.run(
        command,
        env={**os.environ, **OFFLINE, "HOME": str(directory), **environment},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def run_module(tmp_path: Path) -> Callable[..., str]:
    """A function (client, module, *arguments) that runs `python -m module` in a directory of the test's own."""

    def run_it(name: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
        skip_unless_installed(name)
        return run([str(python_of(name)), "-m", *arguments], environment or {}, tmp_path)

    return run_it


def skip_unless_installed(name: str) -> None:
    if not is_installed(name):
        pytest.skip(f"{name} is not installed: python tests/end_to_end/clients/install.py {name}")
