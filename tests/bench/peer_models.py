"""The same weights in the format of each peer, each written once: all come from the embedded model's GGUF file.

The twin holds the file's values, de-quantised and rounded to bfloat16; the other formats are made from one of the two.
A model is complete when its name is there: it is written beside it and renamed.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from peer_install import Installer

EMBEDDED_MODEL = "smollm2-135m"
GGUF_FORMATS = ("bf16", "q8_0", "q4_1")
NO_TOKEN = -1


class Models:
    """Makes models under the installer's directory. Every method raises PeerError where that fails."""

    def __init__(self, installer: Installer, gguf: Path) -> None:
        self._installer = installer
        self._gguf = gguf

    def twin(self) -> Path:
        """Return a directory with the weights in bfloat16."""
        script = str(Path(__file__).with_name("peer_twin.py"))
        return self._once("bf16", lambda path: self._run([sys.executable, script, str(self._gguf), str(path)]))

    def without_end_token(self) -> Path:
        """Return a twin whose generation has no end token, for servers that cannot be told to ignore it."""
        return self._once("bf16-without-end-token", self._copy_without_end_token)

    def openvino_int8(self, environment: Path) -> Path:
        """Return OpenVINO's int8 export of the twin (asymmetric, a scale and zero point per row)."""
        command = [str(environment / "bin" / "optimum-cli"), "export", "openvino", "--model", str(self.twin()),
                   "--task", "text-generation-with-past", "--weight-format", "int8"]  # fmt: skip
        return self._once("openvino-int8", lambda path: self._run([*command, str(path)], {"HF_HUB_OFFLINE": "1"}))

    def gguf(self, gguf_format: str, quantize: Path) -> Path:
        """Return the GGUF file in a format; `quantize` is llama.cpp's program. Q4_1 is the file as it came."""
        if gguf_format == "q4_1":
            return self._gguf
        command = [str(quantize), "--allow-requantize", str(self._gguf)]
        return self._once(f"{gguf_format}.gguf", lambda path: self._run([*command, str(path), gguf_format.upper()]))

    def _once(self, name: str, write: Callable[[Path], None]) -> Path:
        path = self._installer.directory / "models" / f"{EMBEDDED_MODEL}-{name}"
        if not path.exists():
            self._installer.require_permission(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"unfinished-{path.name}")
            shutil.rmtree(unfinished, ignore_errors=True)
            write(unfinished)
            unfinished.rename(path)
        return path

    def _run(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self._installer.run(command, "models", environment)

    def _copy_without_end_token(self, path: Path) -> None:
        shutil.copytree(self.twin(), path)
        for name in ("generation_config.json", "config.json"):
            config = json.loads((path / name).read_text())
            (path / name).write_text(json.dumps(config | {"eos_token_id": NO_TOKEN}))
