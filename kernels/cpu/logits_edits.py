"""What requests do to their logits before a token is drawn, on the CPU."""

from __future__ import annotations

import ctypes

import torch

from octavo.kernels.cpu.arguments import typed_address
from octavo.kernels.cpu.execution import EXECUTOR
from octavo.kernels.ops.logits_edits import WORD_BITS, RowEdits, edit_logits
from octavo.kernels.registry import backend


class _EditLogitsArgs(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("bitmask", ctypes.c_void_p),
        ("mask_rows", ctypes.c_void_p),
        ("banned", ctypes.c_void_p),
        ("biased", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("count_rows", ctypes.c_void_p),
        ("repetition", ctypes.c_void_p),
        ("presence", ctypes.c_void_p),
        ("frequency", ctypes.c_void_p),
        ("vocab_size", ctypes.c_int64),
        ("num_masks", ctypes.c_int64),
        ("num_banned", ctypes.c_int64),
        ("num_biased", ctypes.c_int64),
        ("num_count_rows", ctypes.c_int64),
    )


def _num_rows(table: torch.Tensor | None) -> int:
    return 0 if table is None else table.shape[0]


def _num_pairs(pairs: torch.Tensor | None) -> int:
    return 0 if pairs is None else pairs.shape[1]


def _check_sizes(edits: RowEdits, num_rows: int, vocab_size: int) -> None:
    """Raise ValueError where the kernel would read what there is not."""
    sizes = []
    if edits.bitmask is not None:
        sizes += [(edits.bitmask.shape[1], -(-vocab_size // WORD_BITS)), (len(edits.mask_rows), num_rows)]
    if edits.bias is not None:
        sizes += [(len(edits.bias[1]), edits.bias[0].shape[1])]
    if edits.counts is not None:
        options = (edits.count_rows, edits.repetition, edits.presence, edits.frequency)
        sizes += [(edits.counts.shape[1], vocab_size), *((len(option), num_rows) for option in options)]
    if any(size != expected for size, expected in sizes):
        raise ValueError(f"edits are not those of {num_rows} rows of {vocab_size} logits")


@backend("cpu", implements=edit_logits)
def cpu_edit_logits(logits: torch.Tensor, edits: RowEdits) -> None:
    num_rows, vocab_size = logits.shape
    _check_sizes(edits, num_rows, vocab_size)
    biased, biases = (None, None) if edits.bias is None else edits.bias
    args = _EditLogitsArgs(
        typed_address(logits, torch.float32),
        typed_address(edits.bitmask, torch.int32),
        typed_address(edits.mask_rows, torch.int64),
        typed_address(edits.banned, torch.int64),
        typed_address(biased, torch.int64),
        typed_address(biases, torch.float32),
        typed_address(edits.counts, torch.int32),
        typed_address(edits.count_rows, torch.int64),
        typed_address(edits.repetition, torch.float32),
        typed_address(edits.presence, torch.float32),
        typed_address(edits.frequency, torch.float32),
        vocab_size,
        _num_rows(edits.bitmask),
        _num_pairs(edits.banned),
        _num_pairs(biased),
        _num_rows(edits.counts),
    )
    EXECUTOR.run("edit_logits", args, num_rows)
