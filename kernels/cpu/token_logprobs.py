"""The logprobs of given tokens on the CPU."""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.arguments import address, typed_address
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.cpu.sampling import memory_for_rows
from octavo.kernels.ops.token_logprobs import token_logprobs
from octavo.kernels.registry import backend


class _TokenLogprobsArgs(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("found", ctypes.c_void_p),
        ("num_logits_rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
    )


@backend("cpu", implements=token_logprobs)
def cpu_token_logprobs(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    logits = logits.contiguous()
    num_tokens, (num_logits_rows, vocab_size) = len(token_ids), logits.shape
    if len(rows) != num_tokens:
        raise ValueError(f"{len(rows)} rows for {num_tokens} tokens")
    logprobs = EXECUTOR.empty((num_tokens,), torch.float32)
    found = memory_for_rows(num_tokens, vocab_size)
    args = _TokenLogprobsArgs(
        typed_address(logits, torch.float32),
        typed_address(rows, torch.int64),
        typed_address(token_ids, torch.int64),
        address(logprobs),
        address(found),
        num_logits_rows,
        vocab_size,
    )
    EXECUTOR.run("token_logprobs", args, num_tokens)
    return logprobs
