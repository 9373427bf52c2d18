"""Rotary embedding options of a `config.json`, in the old and the new form of the file.

Old: `rope_theta` beside `rope_scaling: {"type" or "rope_type": ..., "factor": ...}`. New (transformers 5): all of it in
`rope_parameters`. Every scaling that we do not compute (yarn, longrope, partial rotation, one per layer type) is an
error: run without it, a model looks well on short prompts and is wrong on long ones.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec

DEFAULT_THETA = 10000.0

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


class RopeType(StrEnum):
    """How the rotary frequencies are scaled; see layers.rotary for the formulas."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding of a model.

    Attributes:
        theta: base of the frequencies.
        factor: how much longer the context became than the one trained first (all but DEFAULT).
        low_freq_factor, high_freq_factor: bounds of LLAMA3's interpolated band.
        original_max_position_embeddings: context length that DYNAMIC and LLAMA3 were trained with first.
    """

    theta: float = DEFAULT_THETA
    rope_type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


class _RopeParameters(msgspec.Struct):
    """The keys that we know; `type` is the oldest name of `rope_type`."""

    rope_theta: PositiveFloat | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: Annotated[int, msgspec.Meta(ge=1)] | None = None
    partial_rotary_factor: float | None = None


REQUIRED_KEYS = {
    RopeType.DEFAULT: (),
    RopeType.LINEAR: ("factor",),
    RopeType.DYNAMIC: ("factor",),
    RopeType.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _read_type(name: str) -> RopeType:
    try:
        return RopeType(name)
    except ValueError:
        raise ValueError(f"rope type {name!r} is not supported; supported: {', '.join(RopeType)}") from None


def read_rope(
    rope_parameters: dict[str, Any] | None,
    rope_scaling: dict[str, Any] | None,
    rope_theta: float | None,
    max_position_embeddings: int,
) -> RopeConfig:
    """Return the rotary options; the arguments are the keys of config.json.

    Raises ValueError, or msgspec.ValidationError which is one, naming what is missing or not supported.
    """
    keys = msgspec.convert(rope_parameters or rope_scaling or {}, _RopeParameters)
    rope_type = _read_type(keys.rope_type or keys.type or RopeType.DEFAULT)
    missing = [name for name in REQUIRED_KEYS[rope_type] if not getattr(keys, name)]
    if missing:
        raise ValueError(f"rope type {rope_type} needs {', '.join(missing)}")
    if keys.partial_rotary_factor not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor {keys.partial_rotary_factor} is not supported")
    if rope_type is RopeType.LLAMA3 and keys.low_freq_factor >= keys.high_freq_factor:
        raise ValueError("rope type llama3 needs low_freq_factor below high_freq_factor")
    nested = [name for name, value in (rope_parameters or {}).items() if isinstance(value, dict)]
    if nested:
        raise ValueError(f"rope_parameters per layer type ({', '.join(nested)}) are not supported")
    return RopeConfig(
        theta=keys.rope_theta or rope_theta or DEFAULT_THETA,
        rope_type=rope_type,
        factor=keys.factor or 1.0,
        low_freq_factor=keys.low_freq_factor or 1.0,
        high_freq_factor=keys.high_freq_factor or 4.0,
        original_max_position_embeddings=_original_length(rope_type, keys, max_position_embeddings),
    )


def _original_length(rope_type: RopeType, keys: _RopeParameters, max_position_embeddings: int) -> int:
    """DYNAMIC stretches from the model's own length, as its authors' code does; the others say what they need."""
    return max_position_embeddings if rope_type is RopeType.DYNAMIC else keys.original_max_position_embeddings or 0
