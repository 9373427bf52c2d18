"""Runs compiled kernels on a GPU under tests whose tensors are on the host.

The tests of kernels are written for the interpreter and know nothing of devices. Where kernels are compiled, a launch
takes its tensors to the device, storage by storage, so that views of one storage stay views of one storage and offsets
stay what they are, and brings the bytes back afterwards: what the interpreter does the other way round. Wrappers and
tests are the same in both. Slow, and for checks only. Rejected: a device fixture in every test, which each new test
would have to remember.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.runtime.jit import JITFunction


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Moved:
    """The storages of one launch: those of the host, and their copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def take(self, value: Any) -> Any:
        """Return `value` with every tensor of the host in it on the device."""
        if isinstance(value, tuple):
            taken = [self.take(item) for item in value]
            return type(value)(*taken) if hasattr(value, "_fields") else tuple(taken)
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.storages:
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self.device)
            copy.copy_(bytes_of(storage))
            self.storages[storage.data_ptr()] = (storage, copy.untyped_storage())
        _, copied = self.storages[storage.data_ptr()]
        empty = torch.empty(0, dtype=value.dtype, device=self.device)
        return empty.set_(copied, value.storage_offset(), value.shape, value.stride())

    def bring_back(self) -> None:
        for storage, copied in self.storages.values():
            bytes_of(storage).copy_(bytes_of(copied))


def with_tensors_on(device: torch.device, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of a jitted function, with its tensors on `device` while it runs."""

    def run_there(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        moved = Moved(device)
        there = {name: moved.take(value) for name, value in kwargs.items()}
        result = run(function, *map(moved.take, args), grid=grid, warmup=warmup, **there)
        moved.bring_back()
        return result

    return run_there


def install(device: torch.device) -> None:
    """Let every launch of this process run on `device`."""
    JITFunction.run = with_tensors_on(device, JITFunction.run)
