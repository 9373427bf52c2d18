"""Installs the clients whose tests are beside this file; called with names of clients, or with none for all.

    .venv/bin/python tests/end_to_end/clients/install.py

Each client has an environment of its own, because together they ask for versions that exclude each other. They lie
below $OCTAVO_CLIENTS, else in `.venv/clients`, which `make clean` removes. Tests of a client that is not there are
skipped. Versions are pinned: these are the ones with which the tests are known to pass.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
CLIENTS_DIRECTORY = Path(os.environ.get("OCTAVO_CLIENTS", ROOT / ".venv" / "clients")).absolute()


class PythonClient(NamedTuple):
    """What one environment holds.

    Attributes:
        requirements: as pip takes them.
        borrows: it sees the packages of the Python that installs it too, which has PyTorch and transformers already.
    """

    requirements: tuple[str, ...]
    borrows: bool = False


PYTHON_CLIENTS = {
    "guidellm": PythonClient(("guidellm==0.8.1",), borrows=True),
    "lm-eval": PythonClient(("lm-eval[api]==0.4.13",), borrows=True),
    "schemathesis": PythonClient(("schemathesis==4.32.5",)),
}


def python_of(name: str) -> Path:
    """The Python that imports the client `name`."""
    return CLIENTS_DIRECTORY / name / "bin" / "python"


def is_installed(name: str) -> bool:
    return python_of(name).exists()


def install_client(name: str) -> None:
    client, directory = PYTHON_CLIENTS[name], CLIENTS_DIRECTORY / name
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    if client.borrows:
        packages = sysconfig.get_path("purelib", vars={"base": str(directory)})
        Path(packages, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [str(python_of(name)), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, *client.requirements], check=True)


def main(names: Sequence[str]) -> None:
    if unknown := set(names) - set(PYTHON_CLIENTS):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PYTHON_CLIENTS)}")
    for name in names or PYTHON_CLIENTS:
        print(f"{name}: into {CLIENTS_DIRECTORY / name}", flush=True)
        install_client(name)


if __name__ == "__main__":
    main(sys.argv[1:])
