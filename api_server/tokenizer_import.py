"""Helper process: writes tokenizer.json for a model that has its tokenizer only in another form.

`transformers` knows all of those forms. It is imported here alone, because that takes seconds; the result is kept.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from octavo.api_server.helper_process import run_helper
from octavo.protocol.lifecycle import ExitCode, StartupError

COPIED = ("config.json", "generation_config.json")


def convert(source_directory: str, target_directory: str) -> str:
    """Fill `target_directory` with tokenizer.json, its config and copies of the model's own configs."""
    from transformers import AutoTokenizer

    source, target = Path(source_directory), Path(target_directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        tokenizer.save_pretrained(target)
    except Exception as problem:
        raise _unusable(source, f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}") from problem
    if not (target / "tokenizer.json").is_file():
        raise _unusable(source, "it has no form that can be written as tokenizer.json")
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    return str(target)


def _unusable(source: Path, reason: str) -> StartupError:
    return StartupError(
        ExitCode.UNSUPPORTED_MODEL,
        f"{source} has no tokenizer.json and its tokenizer cannot be converted ({reason}); add a tokenizer.json",
    )


if __name__ == "__main__":
    run_helper(convert)
