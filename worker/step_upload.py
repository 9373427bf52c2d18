"""How the arrays of a step reach the device.

On a CPU they are there. To a GPU they go as one copy: side by side in pinned memory, then in one piece to a buffer that
always is at the same place, so that captured graphs find them there. The pinned buffer is written by the host while the
copy of an earlier step may still wait for its turn on the device; so there are as many as steps in flight, used in
turn, and an event says when one is free again. Arrays that come first and have the same shapes each time are at the
same offsets each time; what does not fit any more goes alone, as a copy of its own.

Rejected: one copy per array (each costs the host as much as a small kernel), and page-locking the arrays of the rows
themselves (a step needs other rows in another order every time).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from octavo.worker.device import Device, Event

ALIGNMENT_BYTES = 64  # kernels load 16 bytes at a time from addresses that allow it
NUM_STAGINGS = 2  # steps in flight
MAX_KEPT_VIEWS = 10_000
DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64")}


class DirectUploader:
    """For a device that works in the host's memory: nothing moves."""

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Return tensors that share the arrays' memory."""
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class _Staging(NamedTuple):
    """A pinned buffer, as a tensor and as an array."""

    tensor: torch.Tensor
    array: np.ndarray


class PackedUploader:
    """For a GPU: packs a step's arrays, and copies them at once."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        """`num_bytes` of arrays fit into the one copy."""
        self.device = device
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        tensors = [device.empty_host((num_bytes,), torch.uint8) for _ in range(NUM_STAGINGS)]
        self.stagings = [_Staging(tensor, tensor.numpy()) for tensor in tensors]
        self.copied: list[Event] = [device.record() for _ in range(NUM_STAGINGS)]
        self.turn = 0
        self._views: dict[tuple[int, np.dtype, tuple[int, ...]], torch.Tensor] = {}

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Return the arrays as tensors on the device; see `device.Uploader`."""
        self.turn = (self.turn + 1) % NUM_STAGINGS
        self.copied[self.turn].synchronize()  # long over, unless more steps are in flight than there are buffers
        staging, end, result = self.stagings[self.turn], 0, {}
        for name, array in arrays.items():
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            if start + array.nbytes > len(staging.array):
                result[name] = self._upload_alone(array)
                continue
            end = start + array.nbytes
            staging.array[start:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            result[name] = self._view(start, array)
        self.buffer[:end].copy_(staging.tensor[:end], non_blocking=True)
        self.copied[self.turn] = self.device.record()
        return result

    def _view(self, start: int, array: np.ndarray) -> torch.Tensor:
        """Return the tensor at `start` of the buffer; kept, because making one costs more than packing it."""
        key = (start, array.dtype, array.shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_KEPT_VIEWS:
                self._views.clear()
            part = self.buffer[start : start + array.nbytes]
            view = self._views[key] = part.view(DTYPES[array.dtype]).view(array.shape)
        return view

    def _upload_alone(self, array: np.ndarray) -> torch.Tensor:
        host = self.device.empty_host(array.shape, DTYPES[array.dtype])
        host.numpy()[...] = array
        return torch.empty_like(host, device=self.device.torch_device).copy_(host, non_blocking=True)
