"""Our own reading of a Hugging Face `config.json`: which models we can run, and their sizes.

Everything that would make the model compute something else than its authors trained (an unknown rotary scaling,
another activation, quantised weights) is refused with its name; a key that we do not know and that has never changed
a Llama's arithmetic is ignored. Invariant: a `LlamaConfig` that exists can be built. Imports no torch, so that an
unsupported model is refused before the seconds that torch takes. Rejected: transformers' config classes, whose import
takes as long again and whose defaults change between versions.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from octavo.protocol.config import Dtype, Positive
from octavo.protocol.lifecycle import ExitCode, StartupError
from octavo.worker.models.rope_config import RopeConfig, read_rope

CONFIG_FILE = "config.json"
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
DEFAULT_RMS_NORM_EPS = 1e-6

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and options of a Llama-family model.

    Attributes:
        architecture: one of SUPPORTED_ARCHITECTURES.
        head_dim: width of one attention head; need not be hidden_size / num_query_heads.
        dtype: number format that the checkpoint names; None when it names none.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: Dtype | None


class _ConfigFile(msgspec.Struct, kw_only=True):
    """The keys of config.json that we read, under their own names."""

    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    vocab_size: Positive
    max_position_embeddings: Positive = 2048
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    rms_norm_eps: PositiveFloat = DEFAULT_RMS_NORM_EPS
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: dict[str, Any] | None = None
    rope_theta: PositiveFloat | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


def _unsupported(message: str) -> StartupError:
    return StartupError(ExitCode.UNSUPPORTED_MODEL, f"{CONFIG_FILE}: {message}")


def _read_json(directory: str) -> bytes:
    path = Path(directory) / CONFIG_FILE
    try:
        return path.read_bytes()
    except OSError as problem:
        raise StartupError(ExitCode.MODEL_NOT_FOUND, f"cannot read {path}: {problem.strerror}") from problem


def _check_architecture(names: list[str]) -> str:
    """Return the first supported one of `names`; raise StartupError when there is none."""
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return name
    if not names:
        raise _unsupported(f"names no architecture; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
    nearest = difflib.get_close_matches(names[0], SUPPORTED_ARCHITECTURES, n=1, cutoff=0.0)[0]
    raise _unsupported(
        f"architecture {names[0]} is not supported (nearest: {nearest}); supported: "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _read_dtype(name: str | None) -> Dtype | None:
    if name is None:
        return None
    try:
        return Dtype(name.removeprefix("torch."))
    except ValueError:
        raise _unsupported(f"dtype {name} is not one of {', '.join(Dtype)}") from None


def _check(file: _ConfigFile, num_kv_heads: int, head_dim: int) -> None:
    checks = (
        (file.quantization_config is None, "quantization_config is set; quantised safetensors are not supported yet"),
        (file.hidden_act == "silu", f"hidden_act {file.hidden_act!r} is not supported, only 'silu'"),
        (
            file.num_attention_heads % num_kv_heads == 0,
            f"num_attention_heads {file.num_attention_heads} is not a multiple of num_key_value_heads {num_kv_heads}",
        ),
        (
            file.head_dim is not None or file.hidden_size % file.num_attention_heads == 0,
            f"hidden_size {file.hidden_size} is not a multiple of num_attention_heads {file.num_attention_heads}",
        ),
        (head_dim % 2 == 0, f"head_dim {head_dim} is odd, rotary embedding needs pairs"),
    )
    for is_valid, problem in checks:
        if not is_valid:
            raise _unsupported(problem)


def read_config(directory: str) -> LlamaConfig:
    """Read `config.json` in `directory`.

    Raises StartupError: MODEL_NOT_FOUND when the file cannot be read, UNSUPPORTED_MODEL when it is not valid JSON, a
    key is missing or out of range, or it asks for something that we do not compute.
    """
    data = _read_json(directory)
    try:
        architectures = msgspec.convert(msgspec.json.decode(data), dict[str, Any]).get("architectures") or []
        architecture = _check_architecture(msgspec.convert(architectures, list[str]))
        file = msgspec.json.decode(data, type=_ConfigFile)
        rope = read_rope(file.rope_parameters, file.rope_scaling, file.rope_theta, file.max_position_embeddings)
    except ValueError as problem:  # what msgspec raises is one as well
        raise _unsupported(str(problem)) from problem
    num_kv_heads = file.num_key_value_heads or file.num_attention_heads
    head_dim = file.head_dim or file.hidden_size // file.num_attention_heads
    _check(file, num_kv_heads, head_dim)
    return LlamaConfig(
        architecture=architecture,
        hidden_size=file.hidden_size,
        num_layers=file.num_hidden_layers,
        num_query_heads=file.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=file.intermediate_size,
        vocab_size=file.vocab_size,
        max_position_embeddings=file.max_position_embeddings,
        rms_norm_eps=file.rms_norm_eps,
        rope=rope,
        tie_word_embeddings=file.tie_word_embeddings,
        attention_bias=file.attention_bias,
        mlp_bias=file.mlp_bias,
        dtype=_read_dtype(file.dtype or file.torch_dtype),
    )
