"""What the files beside tokenizer.json say: the named special tokens, and where the chat template hides.

Invariant: a file that is there is valid or refused by its name; a file that is not there says nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from octavo.protocol.lifecycle import ExitCode, StartupError

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFiles(NamedTuple):
    """What a model directory adds to its tokenizer.json.

    Attributes:
        special_tokens: name -> text, such as `bos_token` -> `<s>`; a chat template knows them by these names.
        chat_template: source of the template, or None.
    """

    special_tokens: dict[str, str]
    chat_template: str | None


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read them; raises StartupError that names a file which cannot be read."""
    config = _read_object(directory / "special_tokens_map.json") | _read_object(directory / "tokenizer_config.json")
    return TokenizerFiles(_special_tokens(config), _chat_template(directory, config))


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    extra = config.get("extra_special_tokens")
    found = {name: config.get(name) for name in TOKEN_NAMES} | (extra if isinstance(extra, dict) else {})
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    """Return the template: its own file wins, then tokenizer_config.json, then the older chat_template.json."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template") or _read_object(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = _default_of(template)
    return template if isinstance(template, str) else None


def _default_of(templates: list[Any]) -> str | None:
    """Return the template named `default` of a list of {name, template}, else the only one there is."""
    named = {each.get("name"): each.get("template") for each in templates if isinstance(each, dict)}
    return named.get("default", next(iter(named.values())) if len(named) == 1 else None)


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as problem:
        raise _unreadable(path, problem) from problem


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise _unreadable(path, problem) from problem


def _unreadable(path: Path, problem: Exception) -> StartupError:
    return StartupError(ExitCode.MODEL_NOT_FOUND, f"{path} cannot be read: {problem}")
