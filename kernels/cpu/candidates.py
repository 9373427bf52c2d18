"""The likeliest tokens of each row of logits on the CPU."""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.arguments import address, typed_address
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.cpu.sampling import memory_for_rows
from octavo.kernels.ops.candidates import likeliest_tokens
from octavo.kernels.registry import backend


class _LikeliestTokensArgs(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("masked", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("found", ctypes.c_void_p),
        ("num_logits_rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("num_masked", ctypes.c_int64),
        ("num_listed", ctypes.c_int64),
    )


@backend("cpu", implements=likeliest_tokens)
def cpu_likeliest_tokens(
    logits: torch.Tensor, num_tokens: int, masked: torch.Tensor | None = None, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.contiguous()
    num_logits_rows, vocab_size = logits.shape
    num_lists = num_logits_rows if rows is None else len(rows)
    num_listed = min(num_tokens, vocab_size)
    token_ids = EXECUTOR.empty((num_lists, num_listed), torch.int64)
    logprobs = EXECUTOR.empty((num_lists, num_listed), torch.float32)
    found = memory_for_rows(num_lists, vocab_size)
    args = _LikeliestTokensArgs(
        typed_address(logits, torch.float32),
        typed_address(rows, torch.int64),
        typed_address(masked, torch.int64),
        address(token_ids),
        address(logprobs),
        address(found),
        num_logits_rows,
        vocab_size,
        0 if masked is None else masked.shape[1],
        num_listed,
    )
    EXECUTOR.run("likeliest_tokens", args, num_lists)
    return token_ids, logprobs
