"""Importing this module makes the backend "cpu" known to the registry."""

from octavo.kernels.cpu import (
    activation,
    attention,
    candidates,
    kv_cache,
    logits_edits,
    norm,
    packed_linear,
    philox,
    sampling,
    token_logprobs,
)

__all__ = [
    "activation",
    "attention",
    "candidates",
    "kv_cache",
    "logits_edits",
    "norm",
    "packed_linear",
    "philox",
    "sampling",
    "token_logprobs",
]
