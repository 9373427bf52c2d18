"""What config.json, generation_config.json and the tokenizer files say that the processes without torch need.

Invariant: what is returned was checked; a broken file is refused with its name and the field.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from octavo.protocol.config import DefaultSampling
from octavo.protocol.lifecycle import ExitCode, StartupError

SCALED_ROPE_TYPES = ("linear", "dynamic", "yarn")  # their config states the length before scaling; others after it


class ModelFiles(NamedTuple):
    """Facts about a model.

    Attributes:
        vocab_size: width of the logits.
        max_position_embeddings: tokens that the model was made for, RoPE scaling included.
        eos_token_ids: ids that end an answer, ascending.
    """

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def read_model_files(directory: Path) -> ModelFiles:
    """Read the facts from a Hugging Face directory; raises StartupError with BAD_WEIGHTS for a broken file."""
    config_path = directory / "config.json"
    config = _read_object(config_path)
    vocab_size = _positive(config, "vocab_size", config_path)
    eos_token_ids = _eos_token_ids(directory, config)
    for token_id in eos_token_ids:
        if token_id >= vocab_size:
            raise _broken(directory, f"the EOS token id {token_id} is not below vocab_size {vocab_size}")
    return ModelFiles(vocab_size, _max_positions(config, config_path), eos_token_ids)


def read_default_sampling(directory: Path) -> DefaultSampling:
    """Return what generation_config.json says about sampling, nothing if it is not there; raises as above.

    `do_sample` is not heeded: a request that says nothing about its temperature gets the file's, as in other servers.
    """
    path = directory / "generation_config.json"
    found = _read_object_if_there(path)
    known = {name: found[name] for name in DefaultSampling.__struct_fields__ if found.get(name) is not None}
    try:
        return msgspec.convert(known, DefaultSampling)
    except msgspec.ValidationError as problem:
        raise _broken(path, str(problem)) from problem


def parse_default_sampling(text: str) -> DefaultSampling:
    """Return what the JSON object `text`, given by the operator, says about sampling; raises ValueError."""
    try:
        return msgspec.json.decode(text, type=DefaultSampling)
    except msgspec.MsgspecError as problem:
        raise ValueError(
            f"must be a JSON object of {', '.join(DefaultSampling.__struct_fields__)}: {problem}"
        ) from None


def overridden(default: DefaultSampling, override: DefaultSampling) -> DefaultSampling:
    """Return `default` with all that `override` says in its place."""
    said = {name: value for name, value in msgspec.structs.asdict(override).items() if value is not None}
    return msgspec.structs.replace(default, **said)


def _max_positions(config: dict[str, Any], path: Path) -> int:
    length = _positive(config, "max_position_embeddings", path)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise _broken(path, "rope_scaling must be an object")
    if scaling.get("rope_type", scaling.get("type")) not in SCALED_ROPE_TYPES:
        return length
    factor = scaling.get("factor", 1.0)
    original = scaling.get("original_max_position_embeddings", length)
    if not isinstance(factor, int | float) or not isinstance(original, int) or not 1 <= factor <= 2**20:
        raise _broken(path, "rope_scaling needs a factor of at least 1 and an integer original_max_position_embeddings")
    return max(length, int(original * factor))


def _eos_token_ids(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Collect the ids that end an answer: generation_config.json decides, else config.json; plus the tokenizer's own.

    A chat model's template ends a turn with a token that is often not the EOS of its base model.
    """
    generation = _read_object_if_there(directory / "generation_config.json")
    found = generation.get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(each, int) and each >= 0 for each in ids):
        raise _broken(directory, f"eos_token_id must be one or several token ids, got {found!r}")
    return tuple(sorted({*ids, *_tokenizer_eos_ids(directory)}))


def _tokenizer_eos_ids(directory: Path) -> list[int]:
    token = _read_object_if_there(directory / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    path = directory / "tokenizer.json"
    try:
        tokenizer = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except msgspec.MsgspecError as problem:
        raise _broken(path, str(problem)) from problem
    return [each.id for each in tokenizer.added_tokens if each.content == token]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.MsgspecError as problem:
        raise _broken(path, str(problem)) from problem


def _read_object_if_there(path: Path) -> dict[str, Any]:
    return _read_object(path) if path.is_file() else {}


def _positive(config: dict[str, Any], field: str, path: Path) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _broken(path, f"{field} must be a positive integer, got {value!r}")
    return value


def _broken(path: Path, reason: str) -> StartupError:
    return StartupError(ExitCode.BAD_WEIGHTS, f"{path}: {reason}")
