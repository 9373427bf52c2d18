"""Which kind of device the workers will have, said before anything heavy is imported.

Defaults that suit a GPU do not suit a CPU, and they are needed before a worker could tell. So the kernel's device files
say whether there is a GPU, and the text of PyTorch's version module whether this build can use it. A wrong guess costs
speed, or ends the start with a line that names `--device`. Rejected: importing torch, which takes seconds.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from octavo.protocol.config import DeviceKind

DRIVERS = {"cuda": "nvidiactl", "hip": "kfd"}  # what torch calls the platform -> device file of its driver
VERSION_FILE = "version.py"


def find_torch_directory() -> Path | None:
    """Return where torch is installed, without importing it."""
    spec = find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def detect_device(device_files: Path = Path("/dev"), torch_directory: Path | None = None) -> DeviceKind:
    """Return CUDA where there is a GPU that the installed PyTorch was built for, else CPU."""
    directory = torch_directory or find_torch_directory()
    try:
        text = "" if directory is None else (directory / VERSION_FILE).read_text()
    except OSError:
        text = ""
    for platform, driver in DRIVERS.items():
        is_built_for = re.search(rf"^{platform}\b[^=\n]*=\s*['\"]", text, re.MULTILINE)
        if is_built_for and (device_files / driver).exists():
            return DeviceKind.CUDA
    return DeviceKind.CPU
