"""Grammars as the API server writes them, and small tokenizers and models that follow them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_llama
import tiny_tokenizers
import tokenizers

from octavo.protocol.config import EngineConfig

VOCAB_SIZE = 352  # some more than the tokenizer has
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "enums": {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}, "is_big": {"type": "boolean"}},
        "required": ["color", "is_big"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": [1, 22, None]}, "minItems": 2, "maxItems": 3},
    "nested": {
        "type": "object",
        "properties": {"point": {"type": "object", "properties": {"x": {"const": 7}}, "required": ["x"]}},
        "required": ["point"],
        "additionalProperties": False,
    },
}


def of_schema(schema: dict[str, Any]) -> str:
    """As `response_format` of type json_schema becomes one."""
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return json.dumps({"grammars": [{"json_schema": schema | {"x-guidance": options}}]})


def tokenizer() -> tokenizers.Tokenizer:
    return tiny_tokenizers.byte_level()


def model_config(directory: Path) -> EngineConfig:
    """A random model with a byte-level tokenizer in `directory`."""
    tiny_llama.save(tiny_llama.build(vocab_size=VOCAB_SIZE), directory)
    raw = tokenizer()
    raw.save(str(directory / "tokenizer.json"))
    eos_token_ids = (raw.token_to_id("</s>"),)
    return tiny_llama.engine_config(directory, vocab_size=VOCAB_SIZE, eos_token_ids=eos_token_ids)
