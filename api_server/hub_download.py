"""Helper process: downloads a model from the hub, with the hub library's own progress bar and cache."""

from __future__ import annotations

from octavo.api_server.helper_process import run_helper
from octavo.protocol.lifecycle import ExitCode, StartupError

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken"]


def download(model: str) -> str:
    """Return the directory with the files of `model`; raises StartupError when there is no way to get them."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    except ImportError as problem:
        raise _not_found(
            model, "the package huggingface_hub is not installed (pip install huggingface_hub)"
        ) from problem
    try:
        return snapshot_download(model, allow_patterns=PATTERNS)
    except GatedRepoError as problem:
        raise _not_found(
            model, "it asks for an agreement; accept it on its page and log in (hf auth login)"
        ) from problem
    except RepositoryNotFoundError as problem:
        raise _not_found(model, "there is no such model, or it is private and you are not logged in") from problem
    except HfHubHTTPError as problem:
        raise _not_found(model, str(problem).splitlines()[0]) from problem
    except (OSError, ValueError) as problem:  # no network is one of many kinds of both
        raise _not_found(model, "the hub cannot be reached and the model is not in its local cache") from problem


def _not_found(model: str, reason: str) -> StartupError:
    return StartupError(
        ExitCode.MODEL_NOT_FOUND,
        f"cannot download {model}: {reason}; for a model on this machine, name its directory or .gguf file",
    )


if __name__ == "__main__":
    run_helper(download)
