"""Drawing one token per row of logits on the CPU."""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.arguments import address, typed_address
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.ops.sampling import sample_tokens
from octavo.kernels.registry import backend

SEGMENT = 256  # tokens, as in csrc/row_scan.h


class _SampleTokensArgs(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("top_ks", ctypes.c_void_p),
        ("top_ps", ctypes.c_void_p),
        ("min_ps", ctypes.c_void_p),
        ("uniforms", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("found", ctypes.c_void_p),
        ("vocab_size", ctypes.c_int64),
    )


def memory_for_rows(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Return memory for what threads find out about the segments of each row: two 64-bit numbers per segment."""
    num_segments = -(-vocab_size // SEGMENT)
    return EXECUTOR.empty((num_rows, 2 * num_segments), torch.float64)


@backend("cpu", implements=sample_tokens)
def cpu_sample_tokens(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None,
    top_ps: torch.Tensor | None,
    min_ps: torch.Tensor | None,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    logits = logits.contiguous()
    token_ids = EXECUTOR.empty((len(logits),), torch.int64)
    found = memory_for_rows(*logits.shape)
    args = _SampleTokensArgs(
        typed_address(logits, torch.float32),
        typed_address(temperatures, torch.float32),
        typed_address(top_ks, torch.int64),
        typed_address(top_ps, torch.float64),
        typed_address(min_ps, torch.float32),
        typed_address(uniforms, torch.float64),
        address(token_ids),
        address(found),
        logits.shape[1],
    )
    EXECUTOR.run("sample_tokens", args, len(logits))
    return token_ids
