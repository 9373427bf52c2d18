"""What the commands for running servers share: flags, and the status of an interrupted one."""

from __future__ import annotations

import argparse
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLE = "OCTAVO_API_KEY"
INTERRUPTED = 128 + 2  # what shells make of SIGINT


def add_api_key_flag(parser: Any, default: str | None) -> None:
    """Add --api-key; `default` is what the environment says, which is checked like a flag."""
    parser.add_argument(
        "--api-key",
        type=_api_key,
        default=default,
        metavar="KEY",
        help=f"key that the server wants (default: the variable {API_KEY_VARIABLE}, which other users do not see)",
    )


def _api_key(text: str) -> str:
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError("must be printable ASCII characters without spaces")
    return text
